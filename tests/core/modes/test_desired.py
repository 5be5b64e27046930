"""The mode that the file and the Node's label ask for; the modes here keep their rules in memory."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core.contract.errors import Unsupported
from kproxy_core.contract.values import Fallback
from kproxy_core.model.events import NodeSet
from kproxy_core.model.node import NodeObject
from kproxy_core.modes.choice import Conclusion
from kproxy_core.modes.desired import DesiredMode, NodeLabel, Step, after_file, after_label
from kproxy_core.modes.journal import Entry, Phase, Reason
from kproxy_core.modes.switch import SwitchFailed
from kproxy_core.observe.events import ClusterEvent, EventRecorder
from kproxy_core.observe.health import ProxyHealth
from tests.core.modes.switch_room import V4, Room, names

KEY = "kproxy.dev/mode"
MODES = ("iptables", "nftables")
CONFIGURATION, SWITCH, LABEL = Reason.CONFIGURATION, Reason.SWITCH, Reason.LABEL


@pytest.mark.parametrize(("label", "reason", "step"), [
    ("iptables", CONFIGURATION, Step("iptables", LABEL)),
    ("iptables", SWITCH, Step("iptables", LABEL)),
    ("iptables", LABEL, Step("iptables", LABEL)),
    ("IPTables", LABEL, None),
    ("", LABEL, None),
    ("iptables; reboot", CONFIGURATION, None),
    (None, LABEL, Step("", CONFIGURATION)),
    (None, SWITCH, None),
    (None, CONFIGURATION, None),
])
def test_what_a_label_asks_for(label: str | None, reason: Reason, step: Step | None) -> None:
    assert after_label(label, MODES, reason) == step


@pytest.mark.parametrize(("label", "step"), [
    ("iptables", Step("iptables", LABEL)),
    ("nftables", Step("ipvs", CONFIGURATION)),
    ("unknown", Step("ipvs", CONFIGURATION)),
    (None, Step("ipvs", CONFIGURATION)),
], ids=["in force", "failed", "unknown", "none"])
def test_what_a_file_asks_for_while_iptables_serves(label: str | None, step: Step) -> None:
    assert after_file("ipvs", label, "iptables") == step


class Desk:
    """A desired mode for a room, and what is told about it."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.notes: list[str] = []
        self._events = EventRecorder("node1", self._note)
        self._events.start()
        self.health = ProxyHealth([V4], timeout=60, node_required=False)
        self.concluded = Conclusion("old", None)
        self.fallbacks: list[Fallback] = []
        self.desired = DesiredMode(
            room.switch, self._events, self.health, key=KEY, modes=room.registry.modes,
            conclude=self._conclude, fell_back=self.fallbacks.append)
        self._label = NodeLabel(KEY, self.desired.set_label)

    def _note(self, event: ClusterEvent, _: int) -> None:
        assert (event.kind, event.name, event.type) == ("Node", "node1", "Warning")
        self.notes.append(f"{event.reason}: {event.note}")

    def _conclude(self, configured: str) -> Conclusion:
        if not self.concluded.mode:
            raise Unsupported("no mode works here")
        return self.concluded

    def label(self, value: str | None) -> None:
        """Have the Node seen with this label."""
        self._label.node_seen(NodeObject("node1", labels={} if value is None else {KEY: value}))

    def settle(self) -> None:
        """Wait until nothing is left to do."""
        while (thread := self.desired._thread) is not None:
            thread.join()

    def told(self) -> list[str]:
        """The events."""
        self._events.close()
        return self.notes

    @property
    def problems(self) -> list[str]:
        return [line for line in self.health.problems() if not line.startswith("IPv4: no sync")]

    @property
    def mode(self) -> str:
        return self.room.switch.instance.mode


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    room.start()
    yield room
    room.stop()


@pytest.fixture
def desk(room: Room) -> Desk:
    desk = Desk(room)
    desk.desired.start()
    return desk


def test_a_label_switches_and_its_end_switches_back(room: Room, desk: Desk) -> None:
    desk.label("new")
    desk.settle()
    assert (desk.mode, names(room.new), names(room.old)) == ("new", {"web"}, set())
    assert room.journal.read() == Entry("old", "old", "new", Phase.SERVING, LABEL)
    desk.label(None)
    desk.settle()
    assert (desk.mode, names(room.old), names(room.new)) == ("old", {"web"}, set())
    assert room.journal.read() is None
    assert (desk.told(), desk.problems) == ([], [])


def test_a_label_waits_for_the_first_sync(room: Room) -> None:
    desk = Desk(room)
    desk.label("new")
    assert (desk.desired._thread, desk.mode) == (None, "old")
    desk.desired.start()
    desk.settle()
    assert desk.mode == "new"


def test_a_node_without_the_label_starts_no_thread(room: Room, desk: Desk) -> None:
    desk.label(None)
    desk.settle()
    room.settle()
    assert room.story == []


HOSTILE = "iptables\n\x1b[31m$(reboot)"


def test_an_unknown_mode_changes_nothing_and_is_told_without_its_text(
    room: Room, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.label("new")
    desk.label(HOSTILE)
    desk.settle()
    before = list(room.story)
    desk.label(HOSTILE)
    desk.settle()
    assert room.story == before
    problem = f"label {KEY}: names none of the installed modes, new, old"
    assert desk.problems == [problem]
    assert desk.told() == [f"ModeSwitchFailed: {problem}"]
    assert f"the label {KEY} names none of the installed modes, new, old" in caplog.text
    assert "reboot" not in caplog.text


def test_a_mode_that_fails_is_tried_once_and_rolled_back(room: Room, desk: Desk) -> None:
    room.new.restless = True
    desk.label("new")
    desk.settle()
    assert (desk.mode, names(room.old), names(room.new)) == ("old", {"web"}, set())
    assert room.journal.read() is None
    tried = room.story.count("new full")
    desk.label("new")
    desk.settle()
    assert room.story.count("new full") == tried
    problem = f"label {KEY}: could not switch to new: new: the kernel does not hold what was programmed"
    assert desk.problems == [problem]
    desk.label(None)
    desk.settle()
    assert (desk.problems, room.story.count("new full"), desk.mode) == ([], tried, "old")
    assert desk.told() == [f"ModeSwitchFailed: {problem}"]


def test_a_mode_that_does_not_work_here_changes_nothing(room: Room, desk: Desk) -> None:
    room.new.usable = False
    desk.label("new")
    desk.settle()
    assert desk.problems == [f"label {KEY}: could not switch to new: new does not work here: luck: some."]
    assert "new full" not in room.story
    room.new.usable = True
    desk.desired.switch_by_hand("new", room.told.append)
    assert (desk.mode, desk.desired.named_by, desk.problems) == ("new", KEY, [])
    desk.label(None)
    desk.settle()
    assert desk.mode == "old"


def test_only_the_last_of_quick_changes_is_made(room: Room, desk: Desk) -> None:
    started, go_on = threading.Event(), threading.Event()

    def during() -> None:
        room.new.during = lambda: None
        started.set()
        assert go_on.wait(120)

    room.new.during = during
    desk.label("new")
    assert started.wait(120)
    for value in ("unknown", "old", None, "new", "old"):
        desk.label(value)
    go_on.set()
    desk.settle()
    assert (desk.mode, names(room.old), names(room.new)) == ("old", {"web"}, set())
    assert room.story.count("clean up new") == 1
    assert (desk.told(), desk.problems) == ([], [])


def test_a_label_that_goes_while_its_mode_is_tried_is_followed(room: Room, desk: Desk) -> None:
    def during() -> None:
        room.new.during = lambda: None
        desk.label(None)

    room.new.during = during
    desk.label("new")
    desk.settle()
    assert desk.mode == "old"
    assert room.journal.read() is None


def test_a_switch_by_hand_may_not_leave_the_label(room: Room, desk: Desk) -> None:
    desk.label("new")
    desk.settle()
    refused = f"the label {KEY} of this Node names mode new: change or remove the label"
    with pytest.raises(SwitchFailed, match=refused):
        desk.desired.switch_by_hand("old", room.told.append)
    assert desk.mode == "new"
    desk.desired.switch_by_hand("new", room.told.append)
    assert room.told == ["new already serves"]
    desk.label("unknown")
    desk.settle()
    desk.desired.switch_by_hand("old", room.told.append)
    assert (desk.mode, desk.desired.named_by) == ("old", "")


def test_a_mode_that_was_switched_to_by_hand_stays_without_a_label(room: Room, desk: Desk) -> None:
    desk.desired.switch_by_hand("new", room.told.append)
    desk.label(None)
    desk.settle()
    assert desk.mode == "new"
    assert room.journal.read() == Entry("old", "old", "new", Phase.SERVING, SWITCH)


def test_the_file_is_followed_unless_the_label_is_in_force(room: Room, desk: Desk) -> None:
    desk.desired.configure("new")
    desk.settle()
    assert (desk.mode, room.journal.read()) == ("new", None)
    desk.label("new")
    desk.desired.configure("old")
    desk.settle()
    assert (desk.mode, room.switch.configured) == ("new", "old")
    assert room.journal.read() == Entry("old", "new", "new", Phase.SERVING, LABEL)
    desk.label(None)
    desk.settle()
    assert (desk.mode, room.journal.read()) == ("old", None)


def test_the_file_is_followed_while_the_mode_of_the_label_fails(room: Room, desk: Desk) -> None:
    desk.desired.switch_by_hand("new", room.told.append)
    room.old.usable = False
    desk.label("old")
    desk.settle()
    desk.desired.configure("new")
    desk.settle()
    assert (desk.mode, room.journal.read()) == ("new", None)
    assert len(desk.problems) == 1, "the label still fails"


def test_a_mode_in_the_file_that_fails_is_remembered_as_not_served(room: Room, desk: Desk) -> None:
    room.new.restless = True
    desk.desired.configure("new")
    desk.settle()
    assert desk.problems == [
        "configuration: could not switch to new: new: the kernel does not hold what was programmed"]
    assert room.journal.read() == Entry("new", "old", "old", Phase.SERVING, SWITCH)


@pytest.mark.parametrize("reason", [LABEL, SWITCH])
def test_a_label_that_went_while_no_process_ran_is_noticed(room: Room, reason: Reason) -> None:
    room.to("new")
    room.switch.reason = reason  # as the journal tells the next process
    desk = Desk(room)
    desk.label(None)
    desk.desired.start()
    desk.settle()
    assert desk.mode == ("old" if reason is LABEL else "new")


def test_the_journal_has_the_reason_of_the_mode_to_start_in(room: Room, desk: Desk) -> None:
    found: list[Entry | None] = []
    room.old.during = lambda: found.append(room.journal.read())
    room.new.during = lambda: found.append(room.journal.read())
    desk.label("new")
    desk.settle()
    assert found[0] == Entry("old", "old", "new", Phase.TRYING, CONFIGURATION)
    found.clear()
    desk.label("old")
    desk.settle()
    assert found[0] == Entry("old", "new", "old", Phase.TRYING, LABEL)


def test_without_the_label_a_fallback_of_the_configured_mode_may_serve(room: Room, desk: Desk) -> None:
    desk.label("new")
    desk.settle()
    room.switch.configured = "absent"
    desk.concluded = Conclusion("old", Fallback("absent", "old", "it is not there"))
    desk.label(None)
    desk.settle()
    assert (desk.mode, desk.fallbacks) == ("old", [desk.concluded.fallback])
    assert room.journal.read() is None, "the next start chooses again"


def test_without_a_mode_that_works_the_labelled_one_stays(room: Room, desk: Desk) -> None:
    desk.label("new")
    desk.settle()
    desk.concluded = Conclusion("", None)
    desk.label(None)
    desk.settle()
    assert (desk.mode, room.switch.reason) == ("new", LABEL)
    assert desk.problems == ["configuration: could not switch to old: no mode works here"]


def test_nothing_is_followed_after_the_end(room: Room, desk: Desk) -> None:
    desk.desired.close()
    desk.label("new")
    desk.settle()
    assert desk.mode == "old"


def test_a_switch_under_way_ends_with_the_loop(room: Room, desk: Desk) -> None:
    begun = threading.Event()

    def during() -> None:
        room.rig.loop.stop()
        begun.set()

    room.new.during = during
    desk.label("new")
    assert begun.wait(120)
    desk.desired.close()
    assert desk.problems == [f"label {KEY}: could not switch to new: kproxy is stopping"]


def test_the_first_and_each_new_value_of_a_label_is_told() -> None:
    told: list[str | None] = []
    label = NodeLabel(KEY, told.append)
    for labels in ({}, {"other": "x"}, {KEY: "a"}, {KEY: "a", "other": "y"}, {KEY: "b"}, {}):
        label.node_seen(NodeSet(NodeObject("node1", labels=labels)).node)
    assert told == [None, "a", "b", None]
