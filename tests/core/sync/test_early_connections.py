"""Searches for TCP connections that began before there were rules for them."""

import errno
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy_conformance.builders import addresses, endpoint_slice, node_view, plans, service
from kproxy_core.contract.values import Scope
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family, Protocol, Socket
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.sync.difference import Step
from kproxy_core.sync.flows import EarlyConnections
from kproxy_core.sync.observer import Synced
from tests.core.sync_events import NO_INSTANCE
from tests.patience import PATIENCE

V4, V6 = Family.IPV4, Family.IPV6
(VIP,) = addresses("10.96.0.1")
(WEB,) = plans(node_view(), service("web"), endpoint_slice("web", "10.0.0.1")).values()
(EMPTY,) = plans(node_view(), service("web")).values()
(DNS,) = plans(node_view(), service("dns", "53/UDP")).values()

IsStale = Callable[[Socket], bool]


class Searches:
    """The observer, with recorded searches that take 10 ms each on a clock of their own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended: SimpleQueue[tuple[Family, float, IsStale | None]] = SimpleQueue()
        """The start of each search and its condition; None: it was made to fail."""
        self.problems: list[HostError] = []
        self.told: list[tuple[Family, int, float]] = []
        self.meanwhile: list[Callable[[], None]] = []
        """What happens while the thread waits."""
        self.observer = EarlyConnections(
            lambda *told: self.told.append(told),
            search=self._search, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.meanwhile:
            self.meanwhile.pop()()

    def _search(self, family: Family, is_stale: IsStale) -> int:
        started = round(self.now, 3)
        self._sleep(0.01)
        if self.problems:
            self.ended.put((family, started, None))
            raise self.problems.pop()
        self.ended.put((family, started, is_stale))
        return 3

    def sync(
        self, *steps: Step, family: Family = V4, is_first: bool = False, rules_were_missing: bool = False
    ) -> None:
        """Report a successful sync of a proxy that has web."""
        held: Any = SimpleNamespace(
            family=family, node=node_view(), owner={Frontend(VIP, Protocol.TCP, 80): WEB}.get)
        self.observer.sync_succeeded(Synced(
            plans=held, instance=NO_INSTANCE, scope=Scope.CHANGED, seconds=0.1, steps=steps,
            is_first=is_first, rules_were_missing=rules_were_missing,
        ))  # fmt: skip

    def expect(self, started: float) -> None:
        """Fail unless the next search starts at this time, and looks for connections to web only."""
        family, at, is_stale = self.ended.get(timeout=PATIENCE)
        assert (family, at) == (V4, started)
        assert is_stale is not None
        assert is_stale((VIP, 80))
        assert not is_stale((VIP, 81))

    def expect_none(self) -> None:
        """Fail unless the next search is that for the other family, whose rules were missing."""
        self.sync(family=V6, rules_were_missing=True)
        family, _, _ = self.ended.get(timeout=PATIENCE)
        assert family is V6


@pytest.fixture
def searches() -> Searches:
    return Searches()


ADDED = Step(WEB.key, None, WEB)


def test_a_first_sync_that_finds_its_rules_in_place_searches_for_none(searches: Searches) -> None:
    searches.sync(ADDED, is_first=True)
    searches.expect_none()


def test_a_sync_that_writes_missing_rules_searches(searches: Searches) -> None:
    searches.sync(ADDED, is_first=True, rules_were_missing=True)
    searches.expect(100.05)
    searches.expect_none()


@pytest.mark.parametrize(
    "step",
    [
        Step(WEB.key, WEB, EMPTY), Step(WEB.key, EMPTY, WEB), Step(WEB.key, WEB, None),
        Step(DNS.key, None, DNS),
    ],
    ids=["endpoint removed", "endpoint added", "Service deleted", "UDP"],
)  # fmt: skip
def test_changes_without_new_frontends_of_tcp_search_for_none(searches: Searches, step: Step) -> None:
    searches.sync(step)
    searches.expect_none()


def test_a_repair_is_followed_by_one_search(searches: Searches) -> None:
    searches.sync(rules_were_missing=True)
    searches.expect(100.05)
    searches.sync()
    searches.expect_none()


def test_there_is_one_search_a_second(searches: Searches) -> None:
    for started in (100.05, 101.11, 102.17):
        searches.sync(ADDED)
        searches.expect(started)
    family, deleted, seconds = searches.told[0]
    assert (family, deleted, round(seconds, 3)) == (V4, 3, 0.01)


def test_both_families_are_searched_together(searches: Searches) -> None:
    searches.meanwhile.append(lambda: searches.sync(ADDED, family=V6))
    searches.sync(ADDED)
    assert {searches.ended.get(timeout=PATIENCE)[:2] for _ in Family} == {(V4, 100.05), (V6, 100.06)}


def test_a_failed_search_is_repeated_after_the_next_sync(
    searches: Searches, caplog: pytest.LogCaptureFixture
) -> None:
    searches.problems.append(HostError("no", OSError(errno.ENOBUFS, "no")))
    searches.sync(ADDED)
    assert searches.ended.get(timeout=PATIENCE) == (V4, 100.05, None)
    searches.expect_none()
    assert "could not delete early TCP connections" in caplog.text
    searches.sync()
    searches.expect(102.17)
    searches.sync()
    searches.expect_none()
    assert [family for family, _, _ in searches.told][:2] == [V6, V4]
