"""The addresses of the node that serve node ports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.address import Address, Cidr, Family, family_of, is_loopback
from kproxy_core.plan.node_ports import (
    Everywhere,
    NodePortChoice,
    PrimaryOnly,
    WithinNetworks,
    includes_loopback,
    select_node_port_addresses,
)
from kproxy_core.testing.builders import addresses, cidrs

HERE = addresses("127.0.0.1 ::1 172.19.0.2 172.18.0.2 172.18.0.10 fd00::2 fe80::1")


def within(text: str) -> WithinNetworks:
    return WithinNetworks(cidrs(text))


def primary(text: str) -> PrimaryOnly:
    return PrimaryOnly(addresses(text))


@pytest.mark.parametrize(("choice", "family", "served"), [
    (within("172.18.0.0/24"), Family.IPV4, "172.18.0.2 172.18.0.10"),
    (within("172.18.0.10/32 172.18.0.0/24 172.19.0.0/16"), Family.IPV4, "172.18.0.2 172.18.0.10 172.19.0.2"),
    (within("172.18.0.0/24 fd00::/64"), Family.IPV6, "fd00::2"),
    (within("fe80::/10"), Family.IPV6, "fe80::1"),
    (within("127.0.0.0/8 172.18.0.2/32"), Family.IPV4, "172.18.0.2"),
    (primary("172.18.0.10 fd00::2"), Family.IPV4, "172.18.0.10"),
    (primary("172.18.0.10 fd00::2"), Family.IPV6, "fd00::2"),
])
def test_chosen_addresses(choice: NodePortChoice, family: Family, served: str) -> None:
    selection = select_node_port_addresses(choice, HERE, family)
    assert selection == (tuple(sorted(addresses(served))), False, "")


@pytest.mark.parametrize("choice", [
    Everywhere(), within("0.0.0.0/0 ::/0"), within("172.18.0.0/24 0.0.0.0/0 fd00::/64 ::/0"),
])
@pytest.mark.parametrize("family", Family)
def test_anywhere(choice: NodePortChoice, family: Family) -> None:
    all_here = tuple(sorted(a for a in HERE if family_of(a) is family and not is_loopback(a)))
    assert select_node_port_addresses(choice, HERE, family) == (all_here, True, "")


@pytest.mark.parametrize(("choice", "family", "included"), [
    (Everywhere(), Family.IPV4, True),
    (Everywhere(), Family.IPV6, True),
    (within("0.0.0.0/0"), Family.IPV4, True),
    (within("0.0.0.0/0"), Family.IPV6, False),
    (within("172.18.0.0/24 127.0.0.0/8"), Family.IPV4, True),
    (within("127.0.0.1/32"), Family.IPV4, True),
    (within("172.18.0.0/24 ::1/128"), Family.IPV4, False),
    (within("172.18.0.0/24 ::1/128"), Family.IPV6, True),
    (within("fd00::/64"), Family.IPV6, False),
    (primary("172.18.0.2"), Family.IPV4, False),
])
def test_loopback_is_for_modes_that_can_serve_it(
    choice: NodePortChoice, family: Family, included: bool
) -> None:
    assert includes_loopback(choice, family) is included


@pytest.mark.parametrize(("choice", "family", "problem"), [
    (primary(""), Family.IPV4, "the node's own IPv4 address is not known"),
    (primary("172.18.0.2"), Family.IPV6, "the node's own IPv6 address is not known"),
    (within("172.18.0.0/24"), Family.IPV6, "nodePortAddresses has no IPv6 network"),
    (within("::/0"), Family.IPV4, "nodePortAddresses has no IPv4 network"),
    (within("10.0.0.0/8 1.0.0.0/8"), Family.IPV4, "no address of this node is in 10.0.0.0/8, 1.0.0.0/8"),
    (within("127.0.0.0/8"), Family.IPV4, "no address of this node is in 127.0.0.0/8"),
    (primary("172.18.0.3"), Family.IPV4, "no address of this node is in 172.18.0.3/32"),
])
def test_a_selection_of_no_address_has_a_reason(choice: NodePortChoice, family: Family, problem: str) -> None:
    assert select_node_port_addresses(choice, HERE, family) == ((), False, problem)


packed = st.one_of(st.binary(min_size=4, max_size=4), st.binary(min_size=16, max_size=16)).map(Address)
networks = st.builds(
    lambda address, bits: Cidr(address, min(bits, len(address) * 8)), packed, st.sampled_from([32, 128])
)
choices = st.one_of(
    st.just(Everywhere()),
    st.lists(networks, max_size=3).map(lambda found: WithinNetworks(tuple(found))),
    st.lists(packed, max_size=3).map(lambda found: PrimaryOnly(tuple(found))),
)


@given(choices, st.frozensets(packed), st.sampled_from(Family))
def test_only_requested_addresses_are_selected(
    choice: NodePortChoice, here: frozenset[Address], family: Family
) -> None:
    named = (
        {n.network for n in choice.networks} if isinstance(choice, WithinNetworks)
        else set(choice.addresses) if isinstance(choice, PrimaryOnly) else set()
    )
    selection = select_node_port_addresses(choice, here | named, family)
    assert all(family_of(a) is family and not is_loopback(a) for a in selection.addresses)
    assert selection.anywhere or set(selection.addresses) <= named
    assert selection.anywhere == isinstance(choice, Everywhere)
    # Somewhere, or a reason why nowhere.
    assert bool(selection.anywhere or selection.addresses) != bool(selection.problem)
