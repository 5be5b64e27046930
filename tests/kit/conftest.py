"""The example backend, as a directory on Python's path; and runs of the kit, beside the other tests of it."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.kit_runs import OPTIONS, SIDE_BY_SIDE, Results, play

EXAMPLE = Path(__file__).parents[2] / "examples" / "kproxy-backend-example"

Runs = dict[str, "Future[Results]"]


@pytest.fixture
def example_on_path() -> Iterator[None]:
    """The example's module can be imported, and is not installed."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="package", autouse=True)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The runs for the modes of this session, under way from the first test of the package on."""
    base = tmp_path_factory.mktemp("kit")
    modes = sorted(_chosen(request.session), key=lambda mode: mode not in OPTIONS)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as players:  # What takes longest comes first.
        yield {mode: players.submit(play, mode, base / mode) for mode in modes}


def _chosen(session: pytest.Session) -> set[str]:
    return {
        str(item.callspec.params["mode"])
        for item in session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_backend"
        and "mode" in item.callspec.params
    }
