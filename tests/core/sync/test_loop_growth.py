"""The cost of one change does not depend on the number of Services, counted in function calls."""

import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, service, service_name
from kproxy_core.contract.backend import Backend
from kproxy_core.contract.values import Scope, SyncReport, Update
from kproxy_core.model.events import Event, ServiceGone, ServiceSet, SliceSet
from tests.core.loop_rig import Rig

OLD, NEW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"

FIRST_TIME = 10
"""Calls that only the first change of a process needs."""


class Reader(Backend):
    """A backend that reads only the changes."""

    changed = 0

    def sync(self, update: Update) -> SyncReport:
        if update.scope is Scope.CHANGED:
            self.changed += len(update.changed)
        return SyncReport(len(update.changed))


def address(number: int) -> str:
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def vip(number: int) -> str:
    return address((96 << 16) + number)


def cluster(services: int) -> list[Event]:
    """Return Services with three endpoints each. Every tenth is UDP, every 50th has a Local policy."""
    events: list[Event] = []
    for number in range(services):
        name, port = f"ns/svc-{number}", "53/UDP" if number % 10 == 0 else "80"
        found = [endpoint(address((128 << 16) + 3 * number + n), f"node{n}") for n in range(3)]
        events += [
            ServiceSet(service(name, port, ip=vip(number), internal_local=number % 50 == 0, created=NEW)),
            SliceSet(endpoint_slice(name, *found, ports=[port])),
        ]
    return events


def calls(action: Callable[[], object]) -> int:
    """Return the number of functions that *action* calls, of Python and of C."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


SIZES = (100, 1_000, 10_000)
CHANGES: dict[str, tuple[Event, int]] = {
    "an endpoint leaves": (
        SliceSet(endpoint_slice("ns/svc-7", "10.128.0.21", "10.128.0.22")), 1),
    "a UDP endpoint leaves": (
        SliceSet(endpoint_slice("ns/svc-10", "10.128.0.30", ports=["53/UDP"])), 1),
    "a new endpoint on this node": (
        SliceSet(endpoint_slice("ns/svc-50", endpoint("10.128.0.150", "node1"), ports=["53/UDP"])), 1),
    "a new Service": (ServiceSet(service("ns/new", ip="10.111.0.1")), 1),
    "a deleted Service": (ServiceGone(service_name("ns/svc-7")), 1),
    "an older Service takes a frontend": (ServiceSet(service("ns/old", ip=vip(8), created=OLD)), 2),
    "nothing new": (SliceSet(endpoint_slice("ns/stray", "10.128.0.21")), 0),
}


@pytest.fixture(scope="module")
def costs() -> Mapping[str, Sequence[tuple[int, int]]]:
    """The calls and changed service ports of each of `CHANGES`, made one after the other, by size."""
    found: dict[str, list[tuple[int, int]]] = {change: [] for change in CHANGES}
    for services in SIZES:
        reader = Reader()
        rig = Rig(backend=reader)
        rig.start(*cluster(services))
        for change, (event, _) in CHANGES.items():
            rig.flows_deleted()
            reader.changed = 0
            rig.loop.emit([event])
            found[change].append((calls(rig.loop.turn), reader.changed))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_costs_the_same_among_a_hundred_a_thousand_and_ten_thousand_services(
    costs: Mapping[str, Sequence[tuple[int, int]]], change: str
) -> None:
    _, touched = CHANGES[change]
    assert [changed for _, changed in costs[change]] == [touched] * len(SIZES)
    made = [number for number, _ in costs[change]]
    assert max(made) - min(made) <= FIRST_TIME, made
