"""Foreign commits that may concern the portals: some are damage, others only a reason to compare."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from queue import SimpleQueue
from typing import cast

import pytest

from kproxy_core.linux.errors import HostError
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_core.model.address import Family
from kproxy_userspace.family import FamilyState
from kproxy_userspace.names import PORTALS_HOST
from kproxy_userspace.watch import Watcher
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("node")

COMPARED = "compared"


class Portals:
    """Stands for a family whose portals are intact, and compared in *seconds* during which others run."""

    def __init__(self, events: "SimpleQueue[str]", seconds: float, *, can_read: bool = True) -> None:
        self._events, self._seconds, self._can_read = events, seconds, can_read

    def is_intact(self) -> bool:
        time.sleep(self._seconds)
        self._events.put(COMPARED)
        if not self._can_read:
            raise HostError("iptables-save: killed")
        return True

    def close_departed(self) -> None:
        """No relay departs."""


class NoWorkers:
    def running(self) -> list[object]:
        return []

    def check(self) -> bool:
        return False


class Events:
    """Comparisons and reports of damage, and the commits that cause them."""

    def __init__(self, *, seconds: float = 0.0, can_read: bool = True, share: float = 0.2) -> None:
        self._happened: SimpleQueue[str] = SimpleQueue()
        state = Portals(self._happened, seconds, can_read=can_read)
        families = {Family.IPV4: cast(FamilyState, state)}
        _iptables("-N", PORTALS_HOST)
        self.watch = Watcher(
            families, cast(WorkerPool, NoWorkers()), lambda _, what: self._happened.put(what), 3600.0,
            OwnProcesses(), share)

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self._happened.get(timeout=PATIENCE)

    def delete_foreign_rule(self) -> None:
        """Delete a rule beside the jumps."""
        _iptables("-A", "OUTPUT", "-j", "RETURN")
        _iptables("-D", "OUTPUT", "-j", "RETURN")


def _iptables(*arguments: str) -> None:
    subprocess.run(["iptables", "-w", "-t", "nat", *arguments], check=True)


def test_changes_of_our_chains_are_reported_while_other_commits_have_used_up_the_comparisons() -> None:
    happened = Events(share=1e-9)
    with closing(happened.watch):
        happened.delete_foreign_rule()
        assert next(iter(happened)) == COMPARED
        happened.delete_foreign_rule()
        _iptables("-A", PORTALS_HOST, "-j", "RETURN")
        assert next(iter(happened)).startswith("rule added by ")


def test_comparisons_cost_nothing_while_they_wait() -> None:
    happened = Events(seconds=0.5, share=0.01)  # 50 seconds' worth
    with closing(happened.watch):
        for _ in range(2):
            happened.delete_foreign_rule()
            assert next(iter(happened)) == COMPARED


def test_portals_that_cannot_be_compared_count_as_damaged() -> None:
    happened = Events(can_read=False)
    with closing(happened.watch):
        happened.delete_foreign_rule()
        events = iter(happened)
        assert next(events) == COMPARED
        assert next(events).startswith("rule deleted by ")
