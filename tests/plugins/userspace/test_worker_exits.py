"""The exit of relay workers is reported, whoever notices it first. Orders that they leave undone fail."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import cast

import pytest

from kproxy_core.linux.errors import HostError
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.linux.relay.orders import Serve, WorkerSettings
from kproxy_core.linux.relay.pool import Worker, WorkerPool
from kproxy_core.model.address import Family
from kproxy_userspace.family import FamilyState
from kproxy_userspace.watch import Watcher
from tests.patience import PATIENCE

SETTINGS = WorkerSettings(0.25, -1.0, 3600.0)


@contextmanager
def watching(pool: WorkerPool) -> Iterator[tuple[list[tuple[Family, str]], threading.Event]]:
    """Watch *pool*. Yield the reports, and an event that is set once both families have one."""
    reports: list[tuple[Family, str]] = []
    all_reported = threading.Event()

    def damaged(family: Family, what: str) -> None:
        reports.append((family, what))
        if len(reports) == len(Family):
            all_reported.set()

    families = dict.fromkeys(Family, cast("FamilyState", None))
    with closing(Watcher(families, pool, damaged, None, OwnProcesses())):
        yield reports, all_reported


REPORTS = [(family, "a relay worker exited") for family in Family]


def killing(worker: Worker, act: Callable[..., object]) -> Callable[..., object]:
    """Return *act* followed by the end of *worker*."""

    def do(*arguments: object) -> object:
        done = act(*arguments)
        worker.process.kill()
        worker.process.wait()
        return done

    return do


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("first", [True, False], ids=["before the order", "before its answer"])
def test_an_order_fails_if_the_worker_exits(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    with closing(WorkerPool(1, SETTINGS)) as pool, socket.create_server(("127.0.0.1", 0)) as free:
        order = Serve(1, 1, False, "127.0.0.1", free.getsockname()[1], (("127.0.0.1", 9),), 0)
        free.close()
        pool.serve({})
        (worker,) = pool.running()
        with monkeypatch.context() as patch:
            if first:  # after the pool has looked for exited workers
                patch.setattr(pool, "_command", killing(worker, pool._command))
            else:
                patch.setattr(worker, "send", killing(worker, worker.send))
            with pytest.raises(HostError, match=f"relay worker {worker.process.pid} does not answer"):
                pool.serve({1: order})
        assert pool.serve({1: order}) == {}
        socket.create_connection(("127.0.0.1", order.port)).close()


def test_a_worker_that_does_not_answer_a_question_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(WorkerPool(1, SETTINGS)) as pool:
        pool.serve({})
        (worker,) = pool.running()
        with monkeypatch.context() as patch:
            patch.setattr(worker, "send", killing(worker, worker.send))
            assert pool.report() == []
        with watching(pool) as (reports, all_reported):
            assert all_reported.wait(PATIENCE)
        assert reports == REPORTS


def test_a_worker_that_a_sync_has_replaced_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Event()

    def look() -> list[Worker]:
        looked.set()
        return found

    pool, successor = (WorkerPool(1, SETTINGS) for _ in range(2))
    try:
        pool.serve({})
        successor.serve({})
        (replaced,) = found = pool.running()
        monkeypatch.setattr(pool, "running", look)
        with watching(pool) as (reports, all_reported):
            assert looked.wait(PATIENCE)
            monkeypatch.setattr(pool, "running", successor.running)
            assert all_reported.wait(PATIENCE)
    finally:
        pool.close()
        successor.close()
    assert reports == REPORTS
    pids = [record.fields["pid"] for record in caplog.records if record.message == "relay worker exited"]  # type: ignore[attr-defined]
    assert pids == [replaced.process.pid]
