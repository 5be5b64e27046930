"""What the kernel has acknowledged, and the difference to what is wanted as operations."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kproxy_core.model.address import Address
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs import names
from kproxy_ipvs.batch.servers import DeleteDestination, DeleteServer, Operation, PutDestination, PutServer
from kproxy_ipvs.names import SetKind
from kproxy_ipvs.wanted import (
    Element,
    Scheduling,
    Server,
    ServerKey,
    Style,
    Wanted,
    has_short_circuit,
    wanted,
)

_T = TypeVar("_T")


class HeldServer(NamedTuple):
    """A virtual server as the kernel has it."""

    scheduling: Scheduling
    weights: Mapping[Destination, int]


Entries = Mapping[SetKind, Mapping[str, int]]
"""What sets hold: entry -> mark."""


@dataclass(slots=True)
class Difference:
    """What has to be written."""

    servers: list[Operation] = field(default_factory=list)
    gone: list[DeleteServer] = field(default_factory=list)
    leaving: list[tuple[ServerKey, Destination]] = field(default_factory=list)
    """Real servers that get no new connections and are to be deleted when they have none."""
    adds: list[Element] = field(default_factory=list)
    deletes: list[Element] = field(default_factory=list)
    bind: list[Address] = field(default_factory=list)
    unbind: list[Address] = field(default_factory=list)

    @property
    def operations(self) -> int:
        lists = (self.servers, self.gone, self.adds, self.deletes, self.bind, self.unbind)
        return sum(len(each) for each in lists)


class Marks:
    """Gives each service port with a short circuit a mark of its own, mostly the same after a restart."""

    def __init__(self, masquerade_bit: int) -> None:
        self._bit = masquerade_bit
        self._of: dict[ServicePortKey, int] = {}
        self._taken: set[int] = set()

    def get(self, key: ServicePortKey) -> int:
        """The mark of *key*, which stays its own until `release`."""
        if key not in self._of:
            number = _number(str(key), key.protocol)
            while (mark := names.mark(number, self._bit)) in self._taken:
                number += 1
            self._of[key] = mark
            self._taken.add(mark)
        return self._of[key]

    def release(self, key: ServicePortKey) -> None:
        self._taken.discard(self._of.pop(key, 0))


def _number(text: str, seed: int) -> int:
    """FNV-1a: the same in every process."""
    value = 0x811C9DC5 ^ seed
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value ^ value >> 24


class Applied:
    """What one family holds because of its plans: who wants what, and how often."""

    def __init__(self, masquerade_bit: int) -> None:
        self.marks = Marks(masquerade_bit)
        self._held: dict[ServicePortKey, Wanted] = {}
        self._claims: dict[ServerKey, dict[ServicePortKey, Server]] = {}
        self._elements: Counter[Element] = Counter()
        self._addresses: Counter[Address] = Counter()

    @property
    def servers(self) -> dict[ServerKey, Server]:
        """Every virtual server."""
        return {key: _owner(claims) for key, claims in self._claims.items()}

    @property
    def elements(self) -> Iterable[Element]:
        return self._elements.keys()

    @property
    def addresses(self) -> Collection[Address]:
        return self._addresses.keys()

    def change(self, changed: Mapping[ServicePortKey, ServicePlan | None], style: Style) -> Difference:
        """Take in the changed plans; returns what that means for the kernel. O(changed).

        If the kernel then refuses it, this object is to be thrown away.
        """
        elements: Counter[Element] = Counter()
        addresses: Counter[Address] = Counter()
        before: dict[ServerKey, Server | None] = {}
        for key, plan in changed.items():
            old = self._held.pop(key, None) or Wanted()
            new = Wanted()
            if plan is not None:
                mark = self.marks.get(key) if has_short_circuit(plan) else 0
                new = self._held[key] = wanted(plan, style, mark)
            else:
                self.marks.release(key)
            for server in (*old.servers, *new.servers):
                claims = self._claims.setdefault(server, {})
                before.setdefault(server, _owner(claims) if claims else None)
                claims.pop(key, None)
                if server in new.servers:
                    claims[key] = new.servers[server]
                elif not claims:
                    del self._claims[server]
            elements.subtract(old.elements)
            elements.update(new.elements)
            addresses.subtract(old.addresses)
            addresses.update(new.addresses)
        difference = Difference()
        for server, was in before.items():
            claims = self._claims.get(server, {})
            held = None if was is None else HeldServer(was.scheduling, dict.fromkeys(was.destinations, 1))
            compare_server(server, held, _owner(claims) if claims else None, difference)
        difference.adds, difference.deletes = _count(self._elements, elements)
        difference.bind, difference.unbind = _count(self._addresses, addresses)
        _keep_rewritten(difference)
        return difference


def _owner(claims: Mapping[ServicePortKey, Server]) -> Server:
    """The server that is to be: of several service ports the one that does not mean a node port."""
    return min(claims.values(), key=lambda server: server.of_node_port)


def compare_all(
    applied: Applied,
    servers: Mapping[ServerKey, HeldServer],
    entries: Entries,
    addresses: Iterable[Address],
    foreign: Iterable[ServerKey],
) -> Difference:
    """What has to be written where the kernel holds *servers*, *entries* and *addresses*.

    Virtual servers that are *foreign* are not deleted.
    """
    difference = Difference()
    want = applied.servers
    for key, server in want.items():
        compare_server(key, servers.get(key), server, difference)
    spared = {*want, *foreign}
    difference.gone = [DeleteServer(key) for key in servers if key not in spared]
    for element in applied.elements:
        if entries.get(element.set, {}).get(element.entry) != element.mark:
            difference.adds.append(element)
    wanted_entries = {(element.set, element.entry) for element in applied.elements}
    difference.deletes = [
        Element(kind, entry, mark)
        for kind, held in entries.items()
        for entry, mark in held.items()
        if (kind, entry) not in wanted_entries
    ]
    there, wanted_addresses = set(addresses), set(applied.addresses)
    difference.bind = [address for address in wanted_addresses if address not in there]
    difference.unbind = [address for address in there if address not in wanted_addresses]
    return difference


def compare_server(
    key: ServerKey, held: HeldServer | None, want: Server | None, difference: Difference
) -> None:
    """Add to *difference* what makes *held* into *want*."""
    if want is None:
        if held is not None:
            difference.gone.append(DeleteServer(key))
        return
    if held is None or held.scheduling != want.scheduling:
        difference.servers.append(PutServer(key, want.scheduling, new=held is None))
    weights = {} if held is None else held.weights
    for where in want.destinations:
        weight = weights.get(where)
        if weight != 1:
            difference.servers.append(PutDestination(key, where, 1, new=weight is None))
    keep = set(want.destinations)
    for where, weight in weights.items():
        if where in keep:
            continue
        if not want.graceful:
            difference.servers.append(DeleteDestination(key, where))
            continue
        difference.leaving.append((key, where))
        if weight:
            difference.servers.append(PutDestination(key, where, 0, new=False))


def _count(counts: Counter[_T], changes: Counter[_T]) -> tuple[list[_T], list[_T]]:
    """Add *changes* to *counts*; returns what is there for the first time, and what is gone."""
    appeared, gone = [], []
    for item, change in changes.items():
        if not change:
            continue
        before = counts[item]
        counts[item] = before + change
        if not before:
            appeared.append(item)
        elif not counts[item]:
            del counts[item]
            gone.append(item)
    return appeared, gone


def _keep_rewritten(difference: Difference) -> None:
    """An entry that only gets another mark is written, not deleted."""
    rewritten = {(element.set, element.entry) for element in difference.adds if element.mark}
    if rewritten:
        difference.deletes = [e for e in difference.deletes if (e.set, e.entry) not in rewritten]


def described(difference: Difference) -> Iterator[tuple[str, int]]:
    """Counts by kind, for the log."""
    for name in ("servers", "gone", "leaving", "adds", "deletes", "bind", "unbind"):
        if count := len(getattr(difference, name)):
            yield name, count
