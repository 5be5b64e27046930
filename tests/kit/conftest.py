"""The example backend, as a directory on Python's path; and runs of the kit, beside the other tests of it."""

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.kit_runs import IN_A_GUEST, OPTIONS, SIDE_BY_SIDE, Results, play

EXAMPLE = Path(__file__).parents[2] / "examples" / "kproxy-backend-example"


@pytest.fixture
def example_on_path() -> Iterator[None]:
    """The example's module can be imported, and is not installed."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="package", autouse=True)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, "Future[Results]"]]:
    """The runs for the modes of this session, under way from the first test on."""
    chosen = {
        str(item.callspec.params["mode"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_backend"
        and "mode" in item.callspec.params
    }
    with ThreadPoolExecutor(SIDE_BY_SIDE) as players:
        # What takes longest comes first.
        modes = sorted(chosen, key=lambda mode: (mode not in IN_A_GUEST, mode not in OPTIONS))
        yield {mode: players.submit(play, mode, tmp_path_factory.mktemp(mode)) for mode in modes}
