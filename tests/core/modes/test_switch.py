"""Switches of modes: the calls to each mode and their order, and the rules kept after a failure.

The modes here keep their rules in memory; with packets, all of this is in tests/switch.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import BackendSettings, Caveat
from kproxy_core.model.events import ServiceSet
from kproxy_core.modes.journal import Entry, Phase, Reason
from kproxy_core.modes.switch import SwitchFailed
from kproxy_core.sync.node_facts import NodeSettings
from tests.core.modes.switch_room import DNS, SELF, V4, Room, names
from tests.patience import PATIENCE


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    room.start()
    yield room
    room.stop()


def test_the_old_mode_is_removed_once_the_new_one_serves(room: Room) -> None:
    room.to("new")
    assert room.story == [
        "new full", "new full", "watch new", "retire old, 0 left", "close old", "clean up old"]
    assert names(room.new) == {"web"}
    assert names(room.old) == set()
    assert room.switch.instance.mode == "new"
    assert [instance.mode for instance in room.serving] == ["new"]
    assert room.told == [
        "new works here", "programmed 1 service ports", "read back: complete",
        "IPv4: not probed: the node's address is not on this machine", "new serves", "old is removed",
    ]  # fmt: skip
    assert room.journal.read() == Entry("old", "old", "new", Phase.SERVING)


def test_what_the_new_mode_writes_in_parts_is_whole_before_it_serves(room: Room) -> None:
    room.new.parts = 2
    room.to("new")
    assert room.story[:4] == ["new full", "new partial", "new partial", "new full"]
    assert "read back: complete" in room.told


def test_changes_reach_the_serving_mode(room: Room) -> None:
    room.to("new")
    room.rig.loop.emit([ServiceSet(DNS)])
    room.settle()
    assert names(room.new) == {"web", "dns"}
    assert names(room.old) == set()


def test_changes_during_a_switch_wait_for_its_end(room: Room) -> None:
    def during() -> None:
        room.new.during = lambda: None
        room.rig.loop.emit([ServiceSet(DNS)])

    room.new.during = during
    room.to("new")
    room.settle()
    assert names(room.new) == {"web", "dns"}
    assert "old partial" not in room.story


def test_changes_by_the_new_mode_to_the_old_rules_are_no_damage(room: Room) -> None:
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


def test_the_journal_is_deleted_once_the_configuration_says_what_serves(room: Room) -> None:
    room.to("new")
    room.switch.switch_to("old", room.told.append, reason=Reason.CONFIGURATION, configured="old")
    assert room.journal.read() is None
    assert names(room.old) == {"web"}
    assert names(room.new) == set()


def test_the_mode_that_served_before_is_remembered(room: Room) -> None:
    assert room.switch.before == ""
    room.to("new")
    assert room.switch.before == "old"
    room.to("new")
    assert room.switch.before == "old", "nothing was switched"
    room.to("old")
    assert room.switch.before == "new", "also where the configured mode serves again"
    room.new.usable = False
    with pytest.raises(SwitchFailed):
        room.to("new")
    assert room.switch.before == "new"
    assert room.journal.mode_before("old", "old") == "new", "the next process knows it, too"
    room.switch.switch_to("old", room.told.append, reason=Reason.CONFIGURATION, configured="old")
    assert room.switch.before == "", "the configuration decides"


def test_a_mode_that_serves_already_is_left_alone(room: Room) -> None:
    room.to("old")
    assert room.story == []
    assert room.told == ["old already serves"]


def waiting(room: Room) -> dict[str, float]:
    """Connections that are waited for, by mode."""
    return {found.labels["mode"]: found.value for found in room.retiring.measure()}


def test_established_connections_are_waited_for(room: Room) -> None:
    room.old.connections = 2
    room.to("new")
    assert room.told[-1] == "2 connections still use old"
    assert waiting(room) == {"old": 2}
    assert "clean up old" not in room.story
    room.old.connections, room.old.in_grace = 0, True
    until_waiting(room, {"old": 0})
    assert room.story[-1] == "retire old, 0 left"
    assert "clean up old" not in room.story
    room.old.in_grace = False
    until_it_is_gone(room)
    assert room.story[-2:] == ["close old", "clean up old"]


@pytest.mark.parametrize(("connections", "in_grace", "line"), [
    (2, True, "2 connections still use old"),
    (1, False, "1 connection still uses old"),
    (0, True, "old is removed in a few seconds: connections to it may be on their way"),
    (0, False, "old is removed"),
])  # fmt: skip
def test_the_rest_of_the_old_mode_is_described(
    room: Room, connections: int, in_grace: bool, line: str
) -> None:
    room.old.connections, room.old.in_grace = connections, in_grace
    room.to("new")
    assert room.told[-1] == line


def until_it_is_gone(room: Room) -> None:
    until_waiting(room, {})  # After its clean-up.


def until_waiting(room: Room, wanted: dict[str, float]) -> None:
    for _ in range(1000):
        if waiting(room) == wanted:
            return
        threading.Event().wait(0.01)


@pytest.mark.parametrize("looks", [2, 9], ids=["for a moment", "for good"])
def test_unreadable_connections_do_not_end_a_mode_at_once(room: Room, looks: int) -> None:
    room.old.blind = looks
    room.to("new")
    until_it_is_gone(room)
    seen = ["retire old, 0 left"] if looks == 2 else []
    expected = ["can't see who is left of old"] * min(looks, 5) + seen + ["close old", "clean up old"]
    assert room.story[-len(expected) - 1 :] == ["watch new", *expected]


def test_a_mode_that_serves_again_while_it_retires_keeps_its_rules(room: Room) -> None:
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
    superseded = room.story.index("supersede in old")
    assert "old full" in room.story[superseded:], "older rules are deleted before it serves"
    assert "old full" not in room.story[:superseded]


Fail = Callable[[Room], None]


def unusable(room: Room) -> None:
    room.new.usable = False


def refuses_to_be_made(room: Room) -> None:
    def refuse(mode: str, settings: BackendSettings) -> BackendInstance:
        raise SyncFailed("not today")

    room.registry.make_backend = refuse  # type: ignore[method-assign]


def never_syncs(room: Room) -> None:
    room.new.problems = [SyncFailed("no memory")] * 3


def breaks(room: Room) -> None:
    room.new.problems = [ZeroDivisionError("a bug")]


def is_never_done(room: Room) -> None:
    room.new.restless = True


def lacks_a_port(room: Room) -> None:
    (web,) = room.old.rules
    room.new.unserved = {web: "port 30080 is taken"}


def serves_by_other_means(room: Room) -> None:
    room.new.degraded = "its programs do not load"


def leads_nowhere(room: Room) -> None:
    """The probe's address is this machine's, and nothing brings its connection to the endpoint."""
    room.node = NodeSettings(name="node1", bind_address=SELF)


def can_not_be_remembered(room: Room) -> None:
    (Path(room.journal._path).parent / "away").mkdir()
    room.journal._path = Path("/proc/no-such-directory/mode.json")


@pytest.mark.parametrize(("fail", "problem", "rolled_back"), [
    (unusable, "new does not work here: luck: some", False),
    (can_not_be_remembered, "cannot write .*mode.json", False),
    (refuses_to_be_made, "not today", False),
    (never_syncs, "no memory", True),
    (breaks, "ZeroDivisionError", True),
    (is_never_done, "the kernel does not hold what was programmed", True),
    (lacks_a_port, "new: default/web would not be served: port 30080 is taken", True),
    (serves_by_other_means, "new: its programs do not load", True),
    (leads_nowhere, "did not reach its endpoint", True),
])  # fmt: skip
def test_a_step_that_fails_leaves_the_old_mode_serving(
    room: Room, fail: Fail, problem: str, rolled_back: bool
) -> None:
    fail(room)
    with pytest.raises(SwitchFailed, match=problem):
        room.to("new")
    room.settle()
    assert room.switch.instance.mode == "old"
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


def test_a_failure_that_passes_is_no_reason_to_give_up(room: Room) -> None:
    room.new.problems = [SyncFailed("the lock is held"), None]
    room.to("new")
    assert names(room.new) == {"web"}


def test_the_loop_does_not_wait_for_the_second_try(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = list[threading.Thread]()
    monkeypatch.setattr("kproxy_core.modes.switch.time.sleep",
                        lambda _: waiting.append(threading.current_thread()))
    room.new.problems = [SyncFailed("the lock is held"), None]
    room.to("new")
    assert waiting == [threading.current_thread()]


def test_changes_do_not_wait_for_the_trials_of_a_mode(room: Room) -> None:
    has_changed = threading.Event()

    def hang() -> None:
        room.old.during = has_changed.set
        room.rig.loop.emit([ServiceSet(DNS)])
        assert has_changed.wait(PATIENCE)

    room.new.during_detection = hang
    room.to("new")
    assert names(room.new) == {"web", "dns"}


def test_if_the_old_mode_can_not_be_restored_nothing_is_removed(room: Room) -> None:
    room.new.restless = True
    room.old.problems = [SyncFailed("the kernel is ill")] * 3
    with pytest.raises(SwitchFailed):
        room.to("new")
    assert "clean up new" not in room.story
    assert names(room.new) == {"web"}
    assert room.journal.read() == Entry("old", "old", "new", Phase.TRYING, Reason.CONFIGURATION)


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
    assert problems == ["another switch is in progress"]


def test_a_switch_that_the_end_of_the_process_cuts_off_ends(room: Room) -> None:
    room.new.during = room.rig.loop.stop
    with pytest.raises(SwitchFailed):
        room.to("new")
    entry = room.journal.read()
    assert entry is None or entry.serving == "old"


SAME = Caveat("both do that")
LOST = Caveat("port 9/SCTP is not served")
ONLY_HERE = Caveat("connections go to the least loaded", lost=False, only_here=True)
DIFFERS = Caveat("something is spelled otherwise", lost=False)


@pytest.mark.parametrize(("old", "new", "loses"), [
    ((), (), False),
    ((SAME, LOST), (SAME,), False),
    ((SAME,), (SAME, LOST), True),
    ((SAME,), (SAME, DIFFERS), False),
    ((ONLY_HERE,), (), True),
    ((), (ONLY_HERE,), False),
])  # fmt: skip
def test_a_check_reports_the_changes_of_a_switch(
    room: Room, old: tuple[Caveat, ...], new: tuple[Caveat, ...], loses: bool
) -> None:
    room.old.caveats, room.new.caveats = old, new
    found = room.switch.compare("new")
    assert found.appearing == tuple(c for c in new if c not in old)
    assert found.disappearing == tuple(c for c in old if c not in new)
    assert found.loses == loses
    assert room.story == [], "nothing is done"


def test_a_mode_that_does_not_work_here_is_not_compared(room: Room) -> None:
    room.new.usable = False
    with pytest.raises(SwitchFailed, match="does not work here"):
        room.switch.compare("new")
    with pytest.raises(SwitchFailed, match="no backend provides mode 'newer'"):
        room.switch.compare("newer")
