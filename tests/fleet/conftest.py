"""One fleet for each module of tests. A test that changes it changes it back."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.fleet.fleet import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("fleet"))
