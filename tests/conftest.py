"""Settings for every test: no deadline on examples, nothing left behind, and guests that start at once."""

import gc
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest

from kproxy_conformance.processes import own_name, owner
from tests import rights
from tests.sweep import MARK, sweep

os.environ[MARK] = owner()

_UNTIMED = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=rights.CI)
"""A busy machine is slow."""
hypothesis.settings.register_profile("all", _UNTIMED)
hypothesis.settings.register_profile("some", _UNTIMED, max_examples=25)
hypothesis.settings.load_profile("some")

GUESTS_AT_A_TIME = 1
"""Of one session: each keeps a processor busy, and lanes with guests run side by side."""

Play = Callable[[Sequence[pytest.Item], Path], Any]
GUESTS = pytest.StashKey[dict[Play, "Future[Any]"]]()


def pytest_sessionstart() -> None:
    """Begin without what killed runs have left."""
    sweep()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/M", default="1/1", help="run part N of M of the chosen tests")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of modules that start nothing, for ``-m pure``."""
    if "pure" in item.config.getoption("-m") and isinstance(item, pytest.Function):
        from tests.rooms.pure import is_pure

        if is_pure(item.module.__name__):
            item.add_marker("pure")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the chosen tests; neighbours, which often share a fixture, are kept together."""
    part, _, parts = config.getoption("--part").partition("/")
    size = -(-len(items) // int(parts))
    chosen = items[(int(part) - 1) * size : int(part) * size]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Have no collection of garbage go through all modules and tests again: a quarter of the time."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    rights.provide_run()


def pytest_runtest_setup(item: pytest.Item) -> None:
    rights.require(*rights.needed_by(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave a test out that this process has no right to; in CI it has failed."""
    report = yield
    error = rights.refused_in(call.excinfo.value) if call.excinfo is not None else None
    if error is not None and report.failed and not rights.CI:
        path, line, _ = item.reportinfo()
        report.outcome = "skipped"
        report.longrepr = (str(path), (line or 0) + 1, str(error))
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_namespace_is_left() -> Iterator[None]:
    """Tests name their network namespaces with the process id; at the end none may be left."""
    yield
    names = Path("/run/netns")
    left = [path.name for path in names.glob(f"*{owner()}*")] if names.exists() else []
    assert not left, f"network namespaces left behind: {', '.join(left)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Have all guests of this session begin before its tests: they take longest."""
    marked: dict[Play, list[pytest.Item]] = {}
    for item in session.items if not session.config.option.collectonly else ():
        if (mark := item.get_closest_marker("in_a_guest")) is not None:
            marked.setdefault(mark.kwargs["play"], []).append(item)
    with (
        TemporaryDirectory(prefix=f"{own_name('guests')}-") as base,
        ThreadPoolExecutor(GUESTS_AT_A_TIME) as players,
    ):
        session.stash[GUESTS] = played = {}
        for number, (play, items) in enumerate(marked.items()):
            directory = Path(base, str(number))
            directory.mkdir()
            played[play] = players.submit(play, items, directory)
        try:
            return (yield)
        finally:
            players.shutdown(cancel_futures=True)


@pytest.fixture
def from_guest(request: pytest.FixtureRequest) -> Any:
    """The findings in the guest of a test that is marked ``in_a_guest``."""
    mark = request.node.get_closest_marker("in_a_guest")
    return request.session.stash[GUESTS][mark.kwargs["play"]].result()
