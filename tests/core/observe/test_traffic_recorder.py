"""The recorder reads one backend at a time, and counts each connection once across switches and failures."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import Connections, Failure
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.observe.traffic.recorder import FrontendOwners, StoredTotals, TrafficRecorder
from kproxy_core.plan.service_plan import Frontend
from tests.patience import PATIENCE

V4 = Family.IPV4
WEB = ServicePortKey("default", "web", "http", Protocol.TCP)
VIP = Frontend(Address(bytes([10, 96, 0, 1])), Protocol.TCP, 80)
ONE = Destination(Address(bytes([10, 1, 0, 1])), 8080)


class Instance:
    """A backend that has counted `number` connections; None: it does not count."""

    def __init__(self, mode: str, number: int | None, layer: str = "") -> None:
        self.mode, self.number, self.layer = mode, number, layer
        self.broken = False

    def traffic(self, family: Family) -> list[Connections] | None:
        if self.broken:
            raise BackendError("busy")
        return None if self.number is None else [Connections(VIP, ONE, self.number, self.layer)]


class Owners(FrontendOwners):
    def __init__(self) -> None:
        super().__init__((V4,), lambda: 0.0)

    def owner(self, family: Family, frontend: Frontend) -> ServicePortKey | None:
        return WEB if frontend == VIP else None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 5.0
        return self.now


def recorder(instance: Instance, directory: Path, monkeypatch: pytest.MonkeyPatch) -> TrafficRecorder:
    made = TrafficRecorder((V4,), instance, Owners(), StoredTotals(str(directory)), Clock())  # type: ignore[arg-type]
    monkeypatch.setattr(made.failures, "start", lambda add_volumes: None)
    monkeypatch.setattr(made.failures, "read", lambda: None)
    monkeypatch.setattr("kproxy_core.observe.traffic.tracked.accounting_enabled", lambda: False)
    made.start()
    return made


class HungDisk(StoredTotals):
    """A file that is written only once `answers` is set."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.answers = threading.Event()
        self.is_asked = threading.Event()

    def write(self, content: bytes) -> None:
        self.is_asked.set()
        assert self.answers.wait(PATIENCE)
        super().write(content)


def test_no_sync_waits_for_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder(Instance("one", 3), tmp_path, monkeypatch).stop()
    disk = HungDisk(str(tmp_path))
    monkeypatch.setattr(f"{__name__}.StoredTotals", lambda _: disk)
    made = recorder(Instance("two", 5), tmp_path, monkeypatch)  # It has to write, for counts of another mode.
    assert disk.is_asked.wait(PATIENCE)
    made.owners.before_move()
    assert not disk.answers.is_set()
    disk.answers.set()
    made.stop()


def forwarded(of: TrafficRecorder) -> int:
    return sum(total.forwarded for total in of.read(fresh=0.0).values())


def test_a_restart_goes_on_where_the_last_process_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance("one", 3)
    first = recorder(instance, tmp_path, monkeypatch)
    assert forwarded(first) == 3
    first.stop()
    instance.number = 5
    assert forwarded(recorder(instance, tmp_path, monkeypatch)) == 5


def test_counts_that_another_mode_left_in_the_kernel_are_not_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recorder(Instance("one", 3), tmp_path, monkeypatch)
    first.stop()
    other = Instance("two", 100)
    second = recorder(other, tmp_path, monkeypatch)
    other.number = 102  # before the first periodic reading
    assert forwarded(second) == 5


@pytest.mark.parametrize(("shares", "wanted"), [(True, 7 + 4), (False, 7 + 2)])
def test_a_switch_reads_the_old_mode_and_then_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool, wanted: int
) -> None:
    old = Instance("one", 3)
    made = recorder(old, tmp_path, monkeypatch)
    assert forwarded(made) == 3
    old.number = 7
    new = Instance("two", 9)
    made.switched(new, shares=shares)  # type: ignore[arg-type]
    old.number = 1000
    new.number = 11
    assert forwarded(made) == wanted


@pytest.mark.parametrize("shares", [True, False])
def test_a_process_that_is_killed_after_a_switch_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    old, new = Instance("one", 3), Instance("two", 3)
    recorder(old, tmp_path, monkeypatch).stop()
    made = recorder(old, tmp_path, monkeypatch)
    made.switched(new, shares=shares)  # type: ignore[arg-type]
    new.number = 5
    assert forwarded(recorder(new, tmp_path, monkeypatch)) == 5


def test_a_process_that_is_killed_soon_after_a_start_in_another_mode_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder(Instance("one", 3), tmp_path, monkeypatch).stop()
    other = Instance("two", 100)
    recorder(other, tmp_path, monkeypatch)
    deadline = time.monotonic() + PATIENCE
    while StoredTotals(str(tmp_path)).read(0.0).mode != "two":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other.number = 102
    assert forwarded(recorder(other, tmp_path, monkeypatch)) == 5


@pytest.mark.parametrize("killed", [False, True])
def test_counts_that_cannot_be_read_at_a_switch_are_not_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    made = recorder(Instance("one", 3), tmp_path, monkeypatch)
    new = Instance("two", 100)
    new.broken = True
    made.switched(new, shares=False)  # type: ignore[arg-type]
    new.broken = False
    if killed:
        made = recorder(new, tmp_path, monkeypatch)
    assert forwarded(made) == 3
    new.number = 102
    assert forwarded(made) == 5


def test_counts_of_a_layer_begin_again_with_its_mode_however_large_they_are_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorder(Instance("upper", 3, layer="upper"), tmp_path, monkeypatch)
    assert forwarded(made) == 3
    made.switched(Instance("base", 0), shares=True)  # type: ignore[arg-type]
    again = Instance("upper", None, layer="upper")
    made.switched(again, shares=True)  # type: ignore[arg-type]
    again.number = 5
    assert forwarded(made) == 8


def test_a_reading_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instance = Instance("one", 3)
    made = recorder(instance, tmp_path, monkeypatch)
    instance.broken = True
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.WARNING, "kproxy.run"):
        assert forwarded(made) == forwarded(made) == 0
    assert [record.getMessage() for record in caplog.records] == ["cannot read counts of connections"]
    instance.broken = False
    assert forwarded(made) == 3


def test_a_mode_that_does_not_count_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = recorder(Instance("three", None), tmp_path, monkeypatch)
    logging.getLogger("kproxy").propagate = True
    with caplog.at_level(logging.WARNING, "kproxy.run"):
        assert forwarded(made) == forwarded(made) == 0
    assert [record.getMessage() for record in caplog.records] == ["this mode does not count connections"]


def test_failures_are_counted_for_endpoints_that_had_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorder(Instance("one", 3), tmp_path, monkeypatch)
    report: Any = made._failed
    report(V4, VIP, ONE, Failure.REFUSED)
    report(V4, VIP, ONE._replace(port=1), Failure.RESET)
    report(V4, VIP._replace(port=1), ONE, Failure.REFUSED)
    total = made.read(fresh=0.0)[WEB]
    assert total.failed == total.endpoints[ONE].failed == {Failure.REFUSED: 1}
    assert total.rejected == 0


def test_connections_that_a_port_without_a_listener_refuses_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recorder(Instance("one", 3), tmp_path, monkeypatch)
    report: Any = made._failed
    relay = Destination(Address(bytes([192, 0, 2, 1])), 40001)
    for _ in range(2):
        report(V4, VIP, relay, Failure.REFUSED)
    total = made.read(fresh=0.0)[WEB]
    assert (total.rejected, total.forwarded, total.failed) == (2, 3, {})
