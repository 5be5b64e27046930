"""The declarations of sets and maps."""

import pytest

from kproxy_core.model.address import Family
from kproxy_core.nft.objects import Container, Table
from kproxy_core.nft.rules import ADDRESS, PORT, VERDICT, DataType, Field, destination_address, random_number

FAMILY = Family.IPV4
ADDRESSES, DIALLED = ADDRESS[FAMILY], destination_address(FAMILY)


@pytest.mark.parametrize(("key", "value"), [
    ((DIALLED, random_number(2)), (ADDRESSES, PORT)), ((ADDRESSES, random_number(2)), ()),
])
def test_fields_and_types_in_one_map_are_refused_by_name(
    key: tuple[DataType | Field, ...], value: tuple[DataType | Field, ...]
) -> None:
    """nft aborts when it lists such a map, and with it the listing of all tables."""
    with pytest.raises(ValueError, match="endpoints is declared by fields and types"):
        list(Table(FAMILY, "test").write([Container("endpoints", key, value)]))


@pytest.mark.parametrize("key", [(DIALLED, random_number(2)), (ADDRESSES, PORT)])
@pytest.mark.parametrize("value", [(), (VERDICT,)])
def test_a_verdict_goes_with_either(
    key: tuple[DataType | Field, ...], value: tuple[DataType | Field, ...]
) -> None:
    assert list(Table(FAMILY, "test").write([Container("endpoints", key, value)]))
