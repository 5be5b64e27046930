"""One fleet for each module of tests. A test that changes it changes it back."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fleet.canned import Canned
from tests.fleet.fleet import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[Canned]:
    made = Canned(tmp_path)
    yield made
    made.server.stop()
