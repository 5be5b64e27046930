"""The state that the kernel has acknowledged for one family, and the difference to the wanted state. Pure."""

from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count, groupby
from typing import NamedTuple, TypeVar

from msgspec import Struct, field

from kproxy_core.contract import (
    Address,
    Cidr,
    Destination,
    Protocol,
    ServicePlan,
    ServicePortKey,
    format_address,
)
from kproxy_ipvs import names
from kproxy_ipvs.batch import (
    DeleteDestination,
    DeleteServer,
    Operation,
    PutDestination,
    PutServer,
    RealServerOperation,
)
from kproxy_ipvs.names import SetKind
from kproxy_ipvs.wanted import (
    Scheduling,
    ServerKey,
    SetEntry,
    Style,
    VirtualServer,
    Wanted,
    has_short_circuit,
    wanted,
)

_T = TypeVar("_T")
_Claims = dict[ServicePortKey, VirtualServer]
"""The virtual server that each service port wants under one key."""

_NOTHING = Wanted()


class HeldServer(NamedTuple):
    """A virtual server in the kernel."""

    scheduling: Scheduling
    weights: Mapping[Destination, int]


MANY = 1_000
"""Number of real servers beyond which a virtual server is large: the kernel walks them for each operation."""
FIRST = 100
"""Number of operations on a large virtual server that every sync writes."""

_OTHER = -1
"""Stands for any weight that is not wanted."""

Entries = Mapping[SetKind, Mapping[str, int]]
"""The entries of each set, with their marks."""


class Difference(Struct):
    """Operations that bring the kernel to the wanted state, and what service ports then hold."""

    servers: list[Operation] = field(default_factory=list)
    """Virtual servers to create or change, and their real servers."""
    deleted: list[DeleteServer] = field(default_factory=list)
    draining: list[tuple[ServerKey, Destination]] = field(default_factory=list)
    """Real servers without new connections, to be deleted when the last one ends."""
    large: set[ServerKey] = field(default_factory=set)
    """Those of the virtual servers that have more than `MANY` real servers, before or afterwards."""
    adds: list[SetEntry] = field(default_factory=list)
    deletes: list[SetEntry] = field(default_factory=list)
    bind: set[Address] = field(default_factory=set)
    unbind: set[Address] = field(default_factory=set)
    wanted: dict[ServicePortKey, Wanted] = field(default_factory=dict)
    rest: Sequence[RealServerOperation] = ()
    """What is left for later syncs."""

    def split(self) -> tuple[list[Operation], list[RealServerOperation]]:
        """Return those of `servers` that must not wait, and the others, which do, the fewest first."""
        at_once: list[Operation] = []
        others: list[list[RealServerOperation]] = []
        for key, group in groupby(self.servers, key=lambda operation: operation.key):
            operations = [*group]
            first = FIRST if key in self.large else len(operations)
            at_once += operations[:first]
            others.append([
                each for each in operations[first:] if isinstance(each, (PutDestination, DeleteDestination))])
        others.sort(key=len)
        return at_once, [*chain.from_iterable(others)]

    def leave(self, rest: Sequence[RealServerOperation]) -> None:
        """Leave *rest*, the last of what may wait, for later syncs."""
        if rest:
            left = {(each.key, each.where) for each in rest}
            self.rest = rest
            self.draining = [each for each in self.draining if each not in left]

    @property
    def operations(self) -> int:
        """The number of operations; draining starts with a change of weight, which is among them."""
        return sum(self.counts.values()) - len(self.draining)

    @property
    def counts(self) -> dict[str, int]:
        numbers = {
            "servers": len(self.servers) - len(self.rest), "deleted_servers": len(self.deleted),
            "draining": len(self.draining), "added_entries": len(self.adds),
            "deleted_entries": len(self.deletes), "added_addresses": len(self.bind),
            "deleted_addresses": len(self.unbind),
        }
        return {kind: number for kind, number in numbers.items() if number}


class Applied(Struct):
    """The acknowledged state of one family.

    Service ports can share virtual servers, entries and addresses, so owners are counted: the cost is that of
    the change.
    """

    _wanted: dict[ServicePortKey, Wanted] = field(default_factory=dict)
    _claims: dict[ServerKey, _Claims] = field(default_factory=dict)
    _elements: Counter[SetEntry] = field(default_factory=Counter)
    _addresses: Counter[Address] = field(default_factory=Counter)
    _unfinished: dict[ServerKey, HeldServer] = field(default_factory=dict)
    """Virtual servers that are not as wanted, because a change is written in parts."""

    @classmethod
    def after(
        cls, plans: Mapping[ServicePortKey, ServicePlan], style: Style, before: "Applied | None" = None
    ) -> "Applied":
        """Return the state once the kernel holds *plans*. Marks are kept from *before*."""
        applied = cls()
        for key, plan in plans.items():
            mark = applied._mark(key, plan, style, {}, before)
            applied._put(key, wanted(plan, style, mark))
        return applied

    @property
    def servers(self) -> dict[ServerKey, VirtualServer]:
        return {key: _owner(claims) for key, claims in self._claims.items()}

    @property
    def unfinished(self) -> frozenset[ServicePortKey]:
        """The service ports of virtual servers of which a part is not written yet."""
        return frozenset(chain.from_iterable(self._claims[key] for key in self._unfinished))

    @property
    def elements(self) -> Collection[SetEntry]:
        return self._elements.keys()

    @property
    def addresses(self) -> Collection[Address]:
        """The addresses on the device. Other threads may test membership."""
        return self._addresses.keys()

    def difference(self, changed: Mapping[ServicePortKey, ServicePlan | None], style: Style) -> Difference:
        """Return the operations that bring the kernel from here to the *changed* plans. O(changed)."""
        difference = Difference()
        elements: Counter[SetEntry] = Counter()
        addresses: Counter[Address] = Counter()
        touched: dict[ServerKey, _Claims] = {}
        for key, plan in changed.items():
            old = self._wanted.get(key, _NOTHING)
            new = _NOTHING if plan is None else wanted(plan, style, self._mark(key, plan, style, touched))
            difference.wanted[key] = new
            for server in {**old.servers, **new.servers}:
                claims = touched.setdefault(server, dict(self._claims.get(server, {})))
                claims.pop(key, None)
                if server in new.servers:
                    claims[key] = new.servers[server]
            elements.subtract(old.elements)
            elements.update(new.elements)
            addresses.subtract(old.addresses)
            addresses.update(new.addresses)
        for server, claims in touched.items():
            held = self._unfinished.get(server) or _held(self._claims.get(server))
            compare_server(server, held, _owner(claims) if claims else None, difference)
        difference.adds, deletes = _appeared(self._elements, elements)
        # An entry that gets another mark is overwritten. Deleting it afterwards would delete both.
        rewritten = {(element.set, element.entry) for element in difference.adds if element.mark}
        difference.deletes = [each for each in deletes if (each.set, each.entry) not in rewritten]
        difference.bind, difference.unbind = map(set, _appeared(self._addresses, addresses))
        return difference

    def acknowledge(self, difference: Difference) -> None:
        for key, new in difference.wanted.items():
            self._remove(key)
            if new is not _NOTHING:
                self._put(key, new)
        self.leave(difference.rest)

    def leave(self, rest: Iterable[RealServerOperation]) -> None:
        """Note that all is written but *rest*."""
        for key, group in groupby(rest, key=lambda operation: operation.key):
            server = _owner(self._claims[key])
            weights = dict(server.real_servers)
            for operation in group:
                if isinstance(operation, PutDestination) and operation.new:
                    del weights[operation.where]
                else:
                    weights[operation.where] = _OTHER
            self._unfinished[key] = HeldServer(server.scheduling, weights)

    def _put(self, key: ServicePortKey, new: Wanted) -> None:
        self._wanted[key] = new
        for server in new.servers:
            self._claims.setdefault(server, {})[key] = new.servers[server]
            self._unfinished.pop(server, None)
        self._elements.update(new.elements)
        self._addresses.update(new.addresses)

    def _remove(self, key: ServicePortKey) -> None:
        old = self._wanted.pop(key, _NOTHING)
        for server in old.servers:
            del self._claims[server][key]
            self._unfinished.pop(server, None)
            if not self._claims[server]:
                del self._claims[server]
        _release(self._elements, old.elements)
        _release(self._addresses, old.addresses)

    def _mark(
        self, key: ServicePortKey, plan: ServicePlan, style: Style, touched: dict[ServerKey, _Claims],
        before: "Applied | None" = None,
    ) -> int:
        """Return a mark that no other service port has, mostly the same after a restart; 0 if none is needed.

        Keeps the mark of *key*.
        """
        if not has_short_circuit(plan):
            return 0
        earlier = before or self
        mark = earlier._wanted.get(key, _NOTHING).mark
        if mark and names.is_own_mark(mark, style.masquerade_bit):
            return mark
        marks = (names.mark(n, style.masquerade_bit) for n in count(_number(str(key), key.protocol)))
        taken = ChainMap(self._claims, touched, earlier._claims)
        return next(mark for mark in marks if ServerKey.marked(style.family, mark) not in taken)


def compare(
    expected: Applied, servers: Mapping[ServerKey, HeldServer], entries: Entries,
    addresses: Iterable[Address], foreign: Iterable[ServerKey],
) -> Difference:
    """Return the operations that bring a kernel with *servers*, *entries* and *addresses* to *expected*.

    Virtual servers that are *foreign* are not deleted.
    """
    difference = Difference()
    want = expected.servers
    for key, server in want.items():
        compare_server(key, servers.get(key), server, difference)
    spared = {*want, *foreign}
    difference.deleted = [DeleteServer(key) for key in servers if key not in spared]
    difference.adds = [
        element for element in expected.elements
        if entries.get(element.set, {}).get(element.entry) != element.mark
    ]  # fmt: skip
    wanted_entries = {(element.set, element.entry) for element in expected.elements}
    difference.deletes = [
        SetEntry(kind, entry, mark)
        for kind, held in entries.items()
        for entry, mark in held.items()
        if (kind, entry) not in wanted_entries
    ]
    held_addresses, wanted_addresses = set(addresses), set(expected.addresses)
    difference.bind = wanted_addresses - held_addresses
    difference.unbind = held_addresses - wanted_addresses
    return difference


def is_owned(
    key: ServerKey, on_device: Collection[Address], entries: Entries, excluded: Iterable[Cidr],
    is_own_mark: Callable[[int], bool],
) -> bool:
    """Return whether a virtual server is this mode's: its mark, the device or a set refers to it.

    Other tools own those in *excluded* networks.
    """
    if key.address is None:
        return is_own_mark(key.mark)
    if any(key.address in cidr for cidr in excluded):
        return False
    text = format_address(key.address)
    every, _ = names.NODE_PORT_SETS[Protocol(key.protocol)]
    entry = str(key.port) if every.type == "bitmap:port" else f"{text},sctp:{key.port}"
    return (
        key.address in on_device or text in entries.get(names.IPVS_IPS, ()) or entry in entries.get(every, ())
    )


def foreign_servers(
    servers: Iterable[ServerKey], on_device: Collection[Address], entries: Entries, excluded: Iterable[Cidr],
    masquerade_bit: int,
) -> list[ServerKey]:
    """Return those of *servers* that are not this mode's, by the marks that it uses."""
    is_own_mark = partial(names.is_own_mark, masquerade_bit=masquerade_bit)
    return [key for key in servers if not is_owned(key, on_device, entries, excluded, is_own_mark)]


def compare_server(
    key: ServerKey, held: HeldServer | None, want: VirtualServer | None, difference: Difference
) -> None:
    """Add the operations that turn *held* into *want* to *difference*."""
    if want is None:
        if held is not None:
            difference.deleted.append(DeleteServer(key))
        return
    if held is None or held.scheduling != want.scheduling:
        difference.servers.append(PutServer(key, want.scheduling, new=held is None))
    weights = {} if held is None else held.weights
    real_servers = want.real_servers
    if max(len(weights), len(real_servers)) > MANY:
        difference.large.add(key)
    for where, wanted_weight in real_servers.items():
        weight = weights.get(where)
        if weight != wanted_weight:
            difference.servers.append(PutDestination(key, where, wanted_weight, new=weight is None))
    for where, weight in weights.items():
        if where in real_servers:
            continue
        if not want.graceful:
            difference.servers.append(DeleteDestination(key, where))
            continue
        difference.draining.append((key, where))
        if weight:
            difference.servers.append(PutDestination(key, where, 0, new=False))


def _owner(claims: Mapping[ServicePortKey, VirtualServer]) -> VirtualServer:
    """Return the server to create among those of several service ports: one that is not for a node port."""
    return min(claims.values(), key=lambda server: server.of_node_port)


def _held(claims: _Claims | None) -> HeldServer | None:
    if not claims:
        return None
    server = _owner(claims)
    return HeldServer(server.scheduling, server.real_servers)


def _appeared(counts: Mapping[_T, int], changes: Counter[_T]) -> tuple[list[_T], list[_T]]:
    """Return the items that get their first owner by *changes*, and those that lose their last one."""
    first = [item for item, change in changes.items() if change > 0 and not counts.get(item)]
    last = [item for item, change in changes.items() if change < 0 and not counts.get(item, 0) + change]
    return first, last


def _release(counts: Counter[_T], items: Iterable[_T]) -> None:
    for item in items:
        counts[item] -= 1
        if not counts[item]:
            del counts[item]


def _number(text: str, seed: int) -> int:
    """Return the FNV-1a hash, which is the same in every process."""
    value = 0x811C9DC5 ^ seed
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value ^ value >> 24
