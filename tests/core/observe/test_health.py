"""``/healthz`` and ``/livez``, with clocks that only the tests move."""

import json
from datetime import UTC, datetime

import pytest

from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeObject
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.messages import Answer
from tests.core.sync_events import failed, synced

V4, V6 = Family.IPV4, Family.IPV6
START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


class Node:
    """A proxy's health, and the time."""

    def __init__(self, node_required: bool = False, families: tuple[Family, ...] = (V4, V6)) -> None:
        self.nanoseconds = 0
        self.health = ProxyHealth(
            families,
            timeout=60.0,
            node_required=node_required,
            wall_ns=lambda: int(START.timestamp()) * 10**9 + self.nanoseconds,
            monotonic=lambda: 5000 + self.nanoseconds / 1e9,
        )

    def wait(self, seconds: float) -> None:
        self.nanoseconds += round(seconds * 1e9)

    def in_sync(self) -> "Node":
        for family in (V4, V6):
            self.health.sync_requested(family)
            self.health.sync_succeeded(synced(family))
        return self

    def condition(self) -> tuple[bool, float]:
        """Whether it is well, and since which second."""
        condition = self.health.condition()
        return condition.is_well, condition.since - START.timestamp()

    @property
    def verdicts(self) -> tuple[bool, bool, bool]:
        """Proxy healthy, ready, alive."""
        ready, alive = (answer.status == 200 for answer in (self.health.healthz(), self.health.livez()))
        return self.health.healthy(), ready, alive


GOOD, NOT_YET, OVERDUE = (True, True, True), (False, False, True), (False, False, False)


def test_it_is_ready_once_every_family_has_synced() -> None:
    node = Node()
    assert node.verdicts == NOT_YET
    node.health.sync_succeeded(synced(V4))
    assert node.verdicts == NOT_YET
    node.health.sync_succeeded(synced(V6))
    assert node.verdicts == GOOD


def test_a_proxy_that_waits_for_its_sources_is_alive() -> None:
    node = Node()
    node.wait(3600)
    assert node.verdicts == NOT_YET


def test_a_first_sync_that_never_succeeds_is_unhealthy() -> None:
    node = Node()
    node.health.sync_requested(V4)
    node.wait(60)
    assert node.verdicts == OVERDUE


def test_an_idle_proxy_is_healthy() -> None:
    node = Node().in_sync()
    node.wait(30 * 86400)
    assert node.verdicts == GOOD


@pytest.mark.parametrize(("seconds", "verdicts"), [(59.999, GOOD), (60, OVERDUE), (600, OVERDUE)])
def test_a_requested_sync_may_be_pending_for_the_timeout(
    seconds: float, verdicts: tuple[bool, bool, bool]
) -> None:
    node = Node().in_sync()
    node.health.sync_requested(V6)
    node.wait(seconds)
    assert node.verdicts == verdicts


def test_the_oldest_request_counts() -> None:
    node = Node().in_sync()
    for _ in range(7):
        node.health.sync_requested(V4)
        node.wait(10)
    assert node.verdicts == OVERDUE
    node.health.sync_succeeded(synced(V4))
    assert node.verdicts == GOOD


def test_a_failed_sync_is_no_success() -> None:
    node = Node().in_sync()
    node.health.sync_requested(V4)
    node.wait(30)
    node.health.sync_failed(failed(V4, "kernel: no"))
    node.wait(30)
    assert node.verdicts == OVERDUE


@pytest.mark.parametrize(
    ("required", "seen", "ready"),
    [
        (False, [], True),
        (True, [], False),
        (True, [True], True),
        (True, [True, False], False),
        (False, [False], False),
    ],
)
def test_a_node_that_is_leaving_is_not_ready_but_alive_and_healthy(
    required: bool, seen: list[bool], ready: bool
) -> None:
    node = Node(node_required=required).in_sync()
    for eligible in seen:
        node.health.node_seen(NodeObject("node1", eligible=eligible))
    assert node.verdicts == (True, ready, True)


def test_the_body_is_kube_proxys() -> None:
    node = Node().in_sync()
    node.wait(1.5)
    assert node.health.healthz() == Answer(
        200,
        b'{"lastUpdated":"2026-03-01T12:00:01.5Z","currentTime":"2026-03-01T12:00:01.5Z",'
        b'"nodeEligible":true,"healthy":true,'
        b'"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},'
        b'"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}',
        "application/json",
    )
    assert node.health.livez().body == (
        b'{"lastUpdated":"2026-03-01T12:00:01.5Z","currentTime":"2026-03-01T12:00:01.5Z","healthy":true,'
        b'"status":{"IPv4":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true},'
        b'"IPv6":{"lastUpdated":"2026-03-01T12:00:00Z","healthy":true}}}'
    )


def test_a_failing_body_has_the_time_of_the_last_success_and_the_problem() -> None:
    node = Node().in_sync()
    node.nanoseconds = 1
    node.health.sync_succeeded(synced(V6))
    node.health.sync_requested(V4)
    node.health.sync_failed(failed(V4, 'table "gone"\nreally'))
    node.wait(61)
    assert json.loads(node.health.healthz().body) == {
        "lastUpdated": "2026-03-01T12:00:00.000000001Z",
        "currentTime": "2026-03-01T12:01:01.000000001Z",
        "nodeEligible": True,
        "healthy": False,
        "status": {
            "IPv4": {"lastUpdated": "2026-03-01T12:00:00Z", "healthy": False},
            "IPv6": {"lastUpdated": "2026-03-01T12:00:00.000000001Z", "healthy": True},
        },
        "problems": ['IPv4: table "gone"\nreally'],
    }
    assert b"\n" not in node.health.healthz().body
    node.health.sync_succeeded(synced(V4))
    assert "problems" not in json.loads(node.health.healthz().body)


def test_the_body_is_different_before_the_first_sync() -> None:
    assert json.loads(Node(families=(V4,)).health.healthz().body) == {
        "lastUpdated": "0001-01-01T00:00:00Z",
        "currentTime": "2026-03-01T12:00:00Z",
        "nodeEligible": True,
        "healthy": False,
        "problems": ["IPv4: no sync has succeeded yet"],
    }


def test_a_leaving_node_has_a_healthy_proxy_that_was_updated_before() -> None:
    node = Node().in_sync()
    node.wait(5)
    node.health.node_seen(NodeObject("node1", eligible=False))
    body = json.loads(node.health.healthz().body)
    assert (body["healthy"], body["nodeEligible"]) == (True, False)
    assert body["lastUpdated"] == "2026-03-01T12:00:00Z"


def test_the_problem_of_another_part_is_shown_and_the_proxy_is_healthy() -> None:
    node = Node().in_sync()
    node.health.report("connections to removed endpoints", V4, "cannot change table")
    assert node.health.problems() == ["IPv4: connections to removed endpoints: cannot change table"]
    assert node.health.healthz().status == 200
    node.health.report("connections to removed endpoints", V4, "")
    assert node.health.problems() == []


def test_the_condition_says_since_when_the_proxy_is_well() -> None:
    node = Node()
    node.wait(5)
    assert node.condition() == (False, 0)
    assert node.health.condition().problems == [
        "IPv4: no sync has succeeded yet", "IPv6: no sync has succeeded yet"]
    node.in_sync()
    node.wait(100)
    assert node.condition() == (True, 5)
    node.health.sync_failed(failed(V4, "busy"))
    node.wait(7)
    assert node.condition() == (False, 105)
    node.in_sync()
    assert node.condition() == (True, 112)


def test_a_late_proxy_is_not_well_since_its_oldest_change() -> None:
    node = Node().in_sync()
    node.wait(10)
    node.health.sync_requested(V6)
    node.wait(59)
    assert node.condition() == (True, 0)
    assert node.health.condition().lag == 59
    node.wait(11)
    assert node.condition() == (False, 10)
    assert node.health.condition().problems == ["IPv6: changes have been waiting for 70 s"]


def test_foreign_changes_are_counted() -> None:
    node = Node().in_sync()
    for family in (V4, V6, V6):
        node.health.damage_found(family)
    assert node.health.condition().foreign_changes == 3
    assert node.health.condition().last_sync == START.timestamp()
