"""The exit of relay workers is reported, whoever notices it first."""

import threading
from typing import cast

import pytest

from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import Family
from kproxy_userspace.family import FamilyState
from kproxy_userspace.kernel.workers import Worker, WorkerPool
from kproxy_userspace.watch import Watch
from kproxy_userspace.worker.wire import WorkerSettings

PATIENCE = 20


def test_a_worker_that_a_sync_has_replaced_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    families = dict.fromkeys(Family, cast("FamilyState", None))
    reports: list[tuple[Family, str]] = []
    all_reported = threading.Event()

    def damaged(family: Family, what: str) -> None:
        reports.append((family, what))
        if len(reports) == len(families):
            all_reported.set()

    looked = threading.Event()

    def look() -> list[Worker]:
        looked.set()
        return found

    pool, successor = (WorkerPool(1, WorkerSettings(0.25, -1.0, 3600.0)) for _ in range(2))
    try:
        pool.serve({})
        successor.serve({})
        (replaced,) = found = pool.running()
        monkeypatch.setattr(pool, "running", look)
        watch = Watch(families, pool, damaged, None, OwnProcesses())
        try:
            assert looked.wait(PATIENCE)
            monkeypatch.setattr(pool, "running", successor.running)
            assert all_reported.wait(PATIENCE)
        finally:
            watch.close()
    finally:
        pool.close()
        successor.close()
    assert reports == [(family, "a relay worker exited") for family in families]
    pids = [record.fields["pid"] for record in caplog.records if record.message == "relay worker exited"]  # type: ignore[attr-defined]
    assert pids == [replaced.process.pid]
