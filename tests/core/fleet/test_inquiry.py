"""Answers of nodes, which may be strange."""

import json
from typing import Any

import msgspec
import pytest

from kproxy_core.fleet.answers import decode
from kproxy_core.fleet.cluster import Node, Reply
from kproxy_core.fleet.errors import Unreached
from kproxy_core.fleet.inquiry import Explanation
from tests.core.fleet.answered_packets import says
from tests.core.fleet.test_explain import BOTH, WEB


def decoded(packet: dict[str, Any]) -> list[Any]:
    data = json.dumps({"packets": [packet]}).encode()
    found = decode(Node(name="a", ready=True), Reply(0, data, ""), Explanation)
    return [msgspec.to_builtins(each) for each in found.packets]


def packet() -> dict[str, Any]:
    (found,) = says("a", "10.96.0.1:80", "10.1.1.9", WEB, BOTH).packets
    return dict(found)


def test_what_a_node_says_is_kept_as_far_as_it_is_used() -> None:
    sent = packet()
    (found,) = decoded(sent)
    assert {name: sent[name] for name in found if name not in ("frontend", "kernel")} == {
        name: found[name] for name in found if name not in ("frontend", "kernel")}
    del sent["slices"]
    (older,) = decoded(sent)
    assert "slices" not in older


STRANGE: dict[str, dict[str, Any]] = {
    "a path as a Service": {"frontend": {
        "kind": "ClusterIP", "service": "../web", "port": "", "service_port": "x"}},
    "no socket": {"to": "10.96.0.1"},
    "no endpoint": {"not_chosen": [{"endpoint": "web-1", "because": ""}]},
    "a new outcome": {"outcome": "teleported"},
    "a new protocol": {"protocol": "ICMP"},
    "a new verdict": {"kernel": {"mode": "x", "verdict": "shrugs", "differences": []}},
    "no list": {"endpoints": {}},
    "no line": {"because": "x" * 200_000},
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_answers_are_the_node_s_problem(name: str) -> None:
    with pytest.raises(Unreached, match="another version"):
        decoded(packet() | STRANGE[name])
