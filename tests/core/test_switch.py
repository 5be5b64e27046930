"""Switching modes: who is asked for what, in which order, and what stays when something fails.

The modes here keep their rules in memory; with packets, all of this is in tests/switch.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy_core.backend.api import (
    CONTRACT,
    BackendSettings,
    Caveat,
    Damage,
    Description,
    Detection,
    Leftovers,
    Requirement,
    Scope,
    SyncReport,
    Update,
)
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.backend.hookspecs import ENTRY_POINTS, hookimpl
from kproxy_core.backend.registry import Registry
from kproxy_core.backend.worker import Worker
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.service import ServicePortKey
from kproxy_core.run import retiring as retiring_module
from kproxy_core.run.journal import Entry, Journal, Phase
from kproxy_core.run.node_facts import NodeSettings
from kproxy_core.run.pacing import Pacing
from kproxy_core.run.retiring import Retiring
from kproxy_core.run.switch import Switch, SwitchFailed, Terms
from kproxy_core.sources.events import Complete, ServiceSet
from kproxy_core.testing.builders import service
from tests.core.loop_rig import Rig

V4 = Family.IPV4
WEB, DNS = service("web", ip="127.0.0.2"), service("dns", "53/UDP", ip="127.0.0.3")
SELF = parse_address("127.0.0.1")
SETTINGS = BackendSettings((V4,))


@dataclass(eq=False)
class Mode:
    """A plugin with its kernel; what happens to it is a line in *story*."""

    name: str
    story: list[str]
    rules: dict[ServicePortKey, object] = field(default_factory=dict)
    connections: int = 0
    usable: bool = True
    problems: list[Exception | None] = field(default_factory=list)
    """Raised by the next syncs, one each."""
    restless: bool = False
    """Each sync reports something to do."""
    caveats: tuple[Caveat, ...] = ()
    damaged: Damage | None = None
    during: Callable[[], object] = lambda: None
    """Called by each sync."""

    def entry(self) -> Any:
        return SimpleNamespace(group=ENTRY_POINTS, name=self.name, load=lambda: self, dist=None)

    @hookimpl
    def kproxy_describe(self) -> Description:
        return Description(self.name, "in memory", CONTRACT)

    @hookimpl
    def kproxy_detect(self) -> Detection:
        return Detection(self.name, (Requirement("luck", self.usable, "some"),))

    @hookimpl
    def kproxy_caveats(self) -> tuple[Caveat, ...]:
        return self.caveats

    @hookimpl
    def kproxy_cleanup(self) -> Leftovers:
        self.story.append(f"clean up {self.name}")
        self.rules.clear()
        return Leftovers(self.name)

    @hookimpl
    def kproxy_retire(self) -> Leftovers:
        self.story.append(f"retire {self.name}, {self.connections} left")
        return Leftovers(self.name, waiting=self.connections)

    @hookimpl
    def kproxy_make_backend(self, mode: str) -> "Backend | None":
        return Backend(self) if mode == self.name else None


class Backend:
    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    @hookimpl
    def kproxy_sync(self, update: Update) -> SyncReport:
        mode = self._mode
        mode.during()
        problem = mode.problems.pop(0) if mode.problems else None
        if problem is not None:
            mode.story.append(f"{mode.name} fails")
            raise problem
        before = dict(mode.rules)
        if update.scope is Scope.RESYNC:
            mode.rules = dict(update.plans)
        for key, plan in update.changed.items():
            mode.rules[key] = plan
            if plan is None:
                del mode.rules[key]
        mode.story.append(f"{mode.name} {update.scope.value}")
        return SyncReport(int(mode.restless or before != mode.rules))

    @hookimpl
    def kproxy_render(self) -> str:
        return ""

    @hookimpl
    def kproxy_watch(self, damaged: Damage) -> bool:
        self._mode.story.append(f"watch {self._mode.name}")
        self._mode.damaged = damaged
        return True

    @hookimpl
    def kproxy_close(self) -> None:
        self._mode.story.append(f"close {self._mode.name}")


class Room:
    """A loop that runs in a thread of its own with mode ``old``, and a ``new`` one beside it."""

    def __init__(self, directory: Path) -> None:
        self.story: list[str] = []
        self.old, self.new = Mode("old", self.story), Mode("new", self.story)
        self.registry = Registry([self.old.entry(), self.new.entry()])
        worker = self.registry.make_backend("old", SETTINGS)
        self.synced = threading.Event()
        self.node = NodeSettings(name="node1")
        self.rig = Rig(families=[V4], worker=worker, settings=self.node, addresses=[SELF],
                       all_synced=self.synced.set)
        self.journal = Journal(str(directory))
        self.retiring = Retiring(self.registry, lambda mode: SETTINGS, "old")
        self.told: list[str] = []
        self.serving: list[Worker] = []
        self.switch = Switch(
            self.rig.loop, self.registry, self.retiring, self.journal, worker=worker, configured="old",
            terms=self.terms, serves=self.serving.append,
        )
        self.thread = threading.Thread(target=self.rig.loop.run, daemon=True)

    def terms(self, mode: str) -> Terms:
        return Terms(settings=SETTINGS, node=self.node,
                     pacing=lambda: Pacing(min_interval=0.0, retry_cap=30.0))

    def start(self) -> None:
        self.thread.start()
        self.rig.loop.emit([ServiceSet(WEB), Complete("test")])
        assert self.synced.wait(10)
        self.story.clear()

    def to(self, mode: str) -> None:
        self.switch.to(mode, self.told.append)

    def settle(self) -> None:
        """Wait until the loop has done what it was asked for."""
        for _ in range(3):
            self.rig.loop.call(lambda: None)

    def stop(self) -> None:
        self.rig.loop.stop()
        self.thread.join(10)
        self.retiring.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    room.start()
    yield room
    room.stop()


def names(mode: Mode) -> set[str]:
    return {key.name for key in mode.rules}


def test_the_old_mode_goes_when_the_new_one_serves(room: Room) -> None:
    room.to("new")
    assert room.story == [
        "new full", "new full", "watch new", "retire old, 0 left", "close old", "clean up old"]
    assert names(room.new) == {"web"}
    assert names(room.old) == set()
    assert room.switch.worker.mode == "new"
    assert [worker.mode for worker in room.serving] == ["new"]
    assert room.told == [
        "new works here", "programmed 1 service ports", "read back: all is there",
        "IPv4: not probed, the node's address is not one of this machine", "new serves", "old is gone",
    ]  # fmt: skip
    assert room.journal.read() == Entry("old", "new", "new", Phase.SERVING)


def test_what_changes_goes_to_the_mode_that_serves(room: Room) -> None:
    room.to("new")
    room.rig.loop.emit([ServiceSet(DNS)])
    room.settle()
    assert names(room.new) == {"web", "dns"}
    assert names(room.old) == set()


def test_what_changes_during_a_switch_waits_for_its_end(room: Room) -> None:
    def during() -> None:
        room.new.during = lambda: None
        room.rig.loop.emit([ServiceSet(DNS)])

    room.new.during = during
    room.to("new")
    room.settle()
    assert names(room.new) == {"web", "dns"}
    assert "old partial" not in room.story


def test_what_the_new_mode_does_to_the_old_ones_rules_is_no_damage(room: Room) -> None:
    damaged = room.old.damaged
    assert damaged is not None
    room.new.during = lambda: damaged(V4, "the new mode took a chain over")
    room.to("new")
    damaged(V4, "the clean-up took the rest")
    room.settle()
    assert "old full" not in room.story


def test_the_new_mode_is_asked_for_another_sync_when_it_was_damaged(room: Room) -> None:
    room.to("new")
    assert room.new.damaged is not None
    room.new.damaged(V4, "flushed")
    room.settle()
    assert room.story[-1] == "new full"


def test_the_journal_goes_when_the_configured_mode_serves_again(room: Room) -> None:
    room.to("new")
    room.to("old")
    assert room.journal.read() is None
    assert names(room.old) == {"web"}
    assert names(room.new) == set()


def test_a_mode_that_serves_already_is_left_alone(room: Room) -> None:
    room.to("old")
    assert room.story == []
    assert room.told == ["old serves already"]


def test_established_connections_are_waited_for(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retiring_module, "INTERVAL", 0.01)
    room.old.connections = 2
    room.to("new")
    assert room.told[-1] == "2 connections still go through old"
    assert room.retiring.waiting == {"old": 2}
    assert "clean up old" not in room.story
    room.old.connections = 0
    for _ in range(1000):
        if room.story[-1] == "clean up old":
            break
        threading.Event().wait(0.01)
    assert room.story[-2:] == ["close old", "clean up old"]
    assert room.retiring.waiting == {}


def test_who_comes_back_while_waited_for_keeps_its_rules(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retiring_module, "INTERVAL", 0.01)
    room.old.connections = 1
    room.to("new")
    room.to("old")
    room.old.connections = 0
    for _ in range(1000):
        if "close old" in room.story:
            break
        threading.Event().wait(0.01)
    assert names(room.old) == {"web"}
    assert "clean up old" not in room.story


Fail = Callable[[Room], None]


def unusable(room: Room) -> None:
    room.new.usable = False


def refuses_to_be_made(room: Room) -> None:
    def refuse(mode: str, settings: BackendSettings) -> Worker:
        raise SyncFailed("not today")

    room.registry.make_backend = refuse  # type: ignore[method-assign]


def never_syncs(room: Room) -> None:
    room.new.problems = [SyncFailed("no memory")] * 3


def breaks(room: Room) -> None:
    room.new.problems = [ZeroDivisionError("a bug")]


def is_never_done(room: Room) -> None:
    room.new.restless = True


def leads_nowhere(room: Room) -> None:
    """The probe's address is this machine's, and nothing brings its connection to the endpoint."""
    room.node = NodeSettings(name="node1", bind_address=SELF)


def can_not_be_remembered(room: Room) -> None:
    (Path(room.journal._path).parent / "away").mkdir()
    room.journal._path = Path("/proc/no-such-directory/mode.json")


@pytest.mark.parametrize(("fail", "problem", "rolled_back"), [
    (unusable, "new does not work here: luck: some", False),
    (can_not_be_remembered, "mode.json can't be written", False),
    (refuses_to_be_made, "not today", False),
    (never_syncs, "no memory", True),
    (breaks, "ZeroDivisionError", True),
    (is_never_done, "what was programmed is not what is read back", True),
    (leads_nowhere, "did not lead to its endpoint", True),
])  # fmt: skip
def test_a_step_that_fails_leaves_the_old_mode_serving(
    room: Room, fail: Fail, problem: str, rolled_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_core.run.switch._PAUSE", 0.0)
    fail(room)
    with pytest.raises(SwitchFailed, match=problem):
        room.to("new")
    room.settle()
    assert room.switch.worker.mode == "old"
    assert names(room.old) == {"web"}
    assert names(room.new) == set()
    assert room.serving == []
    assert room.journal.read() is None
    assert ("clean up new" in room.story) == rolled_back
    if rolled_back:
        restored = room.story.index("old full")
        assert restored < room.story.index("clean up new"), "the old mode is made right first"
    room.rig.loop.emit([ServiceSet(DNS)])
    room.settle()
    assert names(room.old) == {"web", "dns"}


def test_a_failure_that_passes_is_no_reason_to_give_up(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_core.run.switch._PAUSE", 0.0)
    room.new.problems = [SyncFailed("the lock is held"), None]
    room.to("new")
    assert names(room.new) == {"web"}


def test_if_the_old_mode_can_not_be_restored_nothing_is_removed(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_core.run.switch._PAUSE", 0.0)
    room.new.restless = True
    room.old.problems = [SyncFailed("the kernel is ill")] * 3
    with pytest.raises(SwitchFailed):
        room.to("new")
    assert "clean up new" not in room.story
    assert names(room.new) == {"web"}
    assert room.journal.read() == Entry("old", "old", "new", Phase.TRYING)


def test_only_one_switch_at_a_time(room: Room) -> None:
    problems: list[str] = []

    def during() -> None:
        room.new.during = lambda: None
        try:
            room.to("new")
        except SwitchFailed as error:
            problems.append(str(error))

    room.new.during = during
    room.to("new")
    assert problems == ["another switch is under way"]


def test_a_switch_that_the_end_of_the_process_cuts_off_ends(room: Room) -> None:
    room.new.during = room.rig.loop.stop
    with pytest.raises(SwitchFailed):
        room.to("new")
    entry = room.journal.read()
    assert entry is None or entry.serving == "old"


SAME = Caveat("both do that")
LOST = Caveat("port 9/SCTP is not served")
DIFFERS = Caveat("something is spelled otherwise", lost=False)


@pytest.mark.parametrize(("old", "new", "loses"), [
    ((), (), False),
    ((SAME, LOST), (SAME,), False),
    ((SAME,), (SAME, LOST), True),
    ((SAME,), (SAME, DIFFERS), False),
])  # fmt: skip
def test_what_would_change_is_told_beforehand(
    room: Room, old: tuple[Caveat, ...], new: tuple[Caveat, ...], loses: bool
) -> None:
    room.old.caveats, room.new.caveats = old, new
    found = room.switch.compare("new")
    assert found.comes == tuple(c for c in new if c not in old)
    assert found.goes == tuple(c for c in old if c not in new)
    assert found.loses == loses
    assert room.story == [], "nothing is done"


def test_a_mode_that_does_not_work_here_is_not_compared(room: Room) -> None:
    room.new.usable = False
    with pytest.raises(SwitchFailed, match="does not work here"):
        room.switch.compare("new")
    with pytest.raises(SwitchFailed, match="no backend provides mode 'newer'"):
        room.switch.compare("newer")
