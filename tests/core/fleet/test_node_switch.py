"""The switch of one node: what its kproxy is asked, and the verdict about its answers."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kproxy_core.fleet.cluster import Cluster, Node, Reply
from kproxy_core.fleet.errors import Forbidden, Unreached
from kproxy_core.fleet.node_switch import NodeSwitch
from kproxy_core.fleet.switch import State

NODE = Node(name="node1", ready=True, pod="kproxy-1", namespace="kube-system", container="kproxy")
WEB, DNS = "10.0.0.1:80/TCP of default/web", "10.0.0.2:53/TCP of kube-system/dns"
CAVEAT = {"what": "SCTP is not served", "service_port": "default/sig", "lost": True, "only_here": False}


class Kproxy(Cluster):
    """A cluster of one node, whose kproxy keeps its mode in memory."""

    def __init__(self) -> None:
        self.mode = "old"
        self.problems: list[list[str]] = []
        """By question for the status; none: it is well."""
        self.failing: list[list[str] | None] = []
        """The frontends that fail in each verification; None: it is unclear."""
        self.losses: list[dict[str, Any]] = []
        self.refusal = ""
        """Of the switch."""
        self.lost: dict[str, Exception] = {}
        """The connection is lost by these commands."""
        self.switches_when_lost = True
        self.asked: list[str] = []

    def ask(
        self, node: Node, command: Sequence[str], timeout: float = 30.0,
        on_line: Callable[[str], None] | None = None, longest: int = 0,
    ) -> Reply:
        assert command[0] == "kproxy"
        kind = "check" if "--check" in command else command[1]
        self.asked.append(kind)
        if kind in self.lost:
            if kind == "switch" and self.switches_when_lost:
                self.mode = command[2]
            raise self.lost.pop(kind)
        answer: Callable[..., Reply] = getattr(self, f"_{kind}")
        return answer(command[2], on_line)

    def _status(self, *_: object) -> Reply:
        problems = self.problems.pop(0) if self.problems else []
        return _printed({
            "mode": self.mode, "configured": "old", "before": "", "version": "1", "well": not problems,
            "since": 0.0, "now": 0.0, "problems": problems, "lag": 0.0, "foreign_changes": 0,
        }, int(bool(problems)))  # fmt: skip

    def _check(self, *_: object) -> Reply:
        if self.mode == "broken":
            return Reply(1, b"", "Error: new does not work here: no luck")
        return _printed({"mode": self.mode, "appearing": self.losses, "disappearing": [],
                         "loses": bool(self.losses), "kernel": []}, int(bool(self.losses)))  # fmt: skip

    def _verify(self, *_: object) -> Reply:
        failing = self.failing.pop(0) if self.failing else []
        if failing is None:
            return Reply(2, b"", "Error: no Service has a TCP frontend here")
        return _printed({"mode": self.mode, "frontends": [
            {"frontend": name.partition("/")[0], "service_port": name.partition(" of ")[2],
             "problems": ["no connection of 1 was answered (hung)"] if name in failing else []}
            for name in (WEB, DNS)
        ]}, int(bool(failing)))  # fmt: skip

    def _switch(self, mode: str, on_line: Callable[[str], None]) -> Reply:
        steps = [json.dumps({"step": "works here"})]
        if self.refusal:
            steps.append(json.dumps({"step": f"rolling back: {self.refusal}"}))
        else:
            self.mode = mode
            steps.append(json.dumps({"ok": True, "mode": mode, "configured": "old"}))
        for step in steps:
            on_line(step)
        error = f"Error: {self.refusal}" if self.refusal else ""
        return Reply(int(bool(error)), "\n".join(steps).encode(), error)


def _printed(answer: object, status: int) -> Reply:
    return Reply(status, json.dumps(answer).encode(), "")


@pytest.fixture
def kproxy() -> Kproxy:
    return Kproxy()


def switched(kproxy: Kproxy) -> tuple[State, tuple[str, ...]]:
    return NodeSwitch(kproxy, NODE, lambda _: None, pause=0.0).run("new")


HUNG = "no connection of 1 was answered (hung)"


def test_a_node_is_checked_verified_switched_and_verified_again(kproxy: Kproxy) -> None:
    steps: list[str] = []
    assert NodeSwitch(kproxy, NODE, steps.append).run("new") == (State.MOVED, ())
    assert kproxy.asked == ["check", "status", "verify", "switch", "status", "verify"]
    assert steps == [
        "checked: nothing would be lost", "verified: 2 of 2 frontends do what the plans say", "works here",
        "verified: 2 of 2 frontends do what the plans say"]


@pytest.mark.parametrize(("failing", "state", "reasons"), [
    ([[], [WEB], [WEB]], State.WORSE, (f"{WEB}: {HUNG}",)),
    ([[], [WEB], []], State.MOVED, ()),
    ([[], [WEB], [DNS]], State.MOVED, ()),
    ([[WEB], [WEB]], State.MOVED, (f"{WEB}: {HUNG}",)),
    ([[WEB], [WEB, DNS], [WEB, DNS]], State.WORSE, (f"{DNS}: {HUNG}",)),
    ([None, None], State.MOVED, ()),
    ([[], None, None], State.WORSE, ("no Service has a TCP frontend here",)),
])  # fmt: skip
def test_connections_that_fail_only_afterwards_and_twice_make_a_node_worse(
    kproxy: Kproxy, failing: list[list[str] | None], state: State, reasons: tuple[str, ...]
) -> None:
    kproxy.failing = failing
    assert switched(kproxy) == (state, reasons)
    assert kproxy.mode == "new"


def test_problems_that_the_status_tells_only_afterwards_make_a_node_worse(kproxy: Kproxy) -> None:
    kproxy.problems = [[], ["IPv4: no memory"], ["IPv4: no memory"]]
    assert switched(kproxy) == (State.WORSE, ("IPv4: no memory",))


def test_a_node_that_serves_in_another_mode_again_is_worse(kproxy: Kproxy) -> None:
    kproxy._switch = lambda *_: Reply(0, b"", "")  # type: ignore[method-assign]
    assert switched(kproxy) == (State.WORSE, ("old serves again",))


def loses(kproxy: Kproxy) -> None:
    kproxy.losses = [CAVEAT]


def does_not_work(kproxy: Kproxy) -> None:
    kproxy.mode = "broken"


def rolls_back(kproxy: Kproxy) -> None:
    kproxy.refusal = "new: the kernel does not hold what was programmed"


@pytest.mark.parametrize(("fail", "reasons", "last"), [
    (loses, ("without --accept-losses, nothing may be lost", "default/sig: SCTP is not served"), "check"),
    (does_not_work, ("new does not work here: no luck",), "check"),
    (rolls_back, ("new: the kernel does not hold what was programmed",), "switch"),
])  # fmt: skip
def test_a_node_that_refuses_serves_as_before(
    kproxy: Kproxy, fail: Callable[[Kproxy], None], reasons: tuple[str, ...], last: str
) -> None:
    fail(kproxy)
    before = kproxy.mode
    assert switched(kproxy) == (State.REFUSED, reasons)
    assert kproxy.asked[-1] == last
    assert kproxy.mode == before


def test_losses_that_are_accepted_are_told_and_do_not_stop_it(kproxy: Kproxy) -> None:
    kproxy.losses = [CAVEAT]
    steps: list[str] = []
    switch = NodeSwitch(kproxy, NODE, steps.append, accepts_losses=True)
    assert switch.run("new") == (State.MOVED, ())
    assert steps[0] == "lost: default/sig: SCTP is not served"
    assert kproxy.mode == "new"


GONE = Unreached("node1", "the connection broke")


@pytest.mark.parametrize(("command", "state", "reasons"), [
    ("check", State.LOST, ("not switched: the connection broke",)),
    ("verify", State.LOST, ("not switched: the connection broke",)),
    ("switch", State.MOVED, ()),
])  # fmt: skip
def test_a_lost_connection_does_not_undo_a_switch(
    kproxy: Kproxy, command: str, state: State, reasons: tuple[str, ...]
) -> None:
    kproxy.lost = {command: GONE}
    assert switched(kproxy) == (state, reasons)


def test_a_switch_whose_result_stays_unknown_is_lost(
    kproxy: Kproxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_core.fleet.node_switch._SETTLES", 0.0)
    kproxy.lost = {"switch": Forbidden("create", "pods/exec", "kube-system")}
    kproxy.switches_when_lost = False
    assert switched(kproxy) == (
        State.LOST, ("the connection was lost during the switch, and old serves",))
