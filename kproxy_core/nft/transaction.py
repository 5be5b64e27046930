"""Transactions: the difference between wanted and held tables, and the socket that writes it."""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple, Self

from kproxy_core.netlink.messages import NETLINK_NETFILTER, Malformed, NetlinkRequest
from kproxy_core.netlink.sockets import NetlinkSocket, kernel
from kproxy_core.nft.elements import CATCH_ALL, Element, PlainElement, element_request, plain_lists
from kproxy_core.nft.listing import HeldTable, Reader
from kproxy_core.nft.messages import DELSETELEM, NEWSETELEM, Command, transaction
from kproxy_core.nft.objects import (
    DORMANT,
    OWNER,
    PERSIST,
    Chain,
    Container,
    Layout,
    Leftover,
    Object,
    Table,
    chain_attributes,
    constant_elements,
    container_attributes,
)
from kproxy_core.nft.rules import HeldRule, same_attributes

log = logging.getLogger("kproxy.nft")

_FIRST_SEQUENCE = 2
"""Sequence number of the first request of a transaction, after its beginning."""
_POLICY = 5
_SEND_SPACE = 256 << 20
"""Limit in bytes for one transaction. The kernel reserves nothing for it."""
_RECEIVE_SPACE = 8 << 20
"""Limit in bytes for the kernel's answers."""


class Replacement(Exception):
    """The table differs from the wanted one in a property that cannot be changed."""


def constants(layout: Layout) -> list[str]:
    """Return the names of the sets whose elements are constant."""
    return [
        item.name for item in layout.values()
        if isinstance(item, Container) and item.constant is not None
    ]  # fmt: skip


def difference(table: Table, layout: Layout, held: HeldTable | None) -> list[Command]:
    """Return the commands that bring *held* to *layout*. Keeps unwanted objects; see `unwanted`.

    Elements that are not constant are kept, but for catch-alls. Raises Replacement if the table must be
    replaced as a whole, TooLong.
    """
    if held is None:
        return [table.create(), *table.write(layout.values())]
    commands = []
    if not same_attributes(table.attributes(), held.attributes):
        if not _can_become(table, held):
            raise Replacement
        commands.append(table.create())
    changed = [item for item in layout.values() if not _holds(table, held, item)]
    catch_alls = [item for name in held.catch_alls if isinstance(item := layout.get(name), Container)]
    for container in catch_alls:
        commands += table.delete_elements(container, [CATCH_ALL])
    return [*commands, *table.write(changed)]


def replacement(table: Table, layout: Layout) -> list[Command]:
    """Return the commands that replace an existing table, whatever it holds."""
    return [table.delete(), *difference(table, layout, None)]


def count_changes(table: Table, commands: Sequence[Command], held: HeldTable | None) -> int:
    """Return the number of *commands* without those that create or claim the table itself.

    Waking a dormant table is a change.
    """
    is_dormant = held is not None and bool(_flags(held) & DORMANT)
    return len(commands) - commands.count(table.create()) + is_dormant


def _flags(held: HeldTable) -> int:
    return int.from_bytes(held.attributes.get(2, b""), "big")


def _can_become(table: Table, held: HeldTable) -> bool:
    """Return whether *table* can be made of *held* by waking it, or by claiming it after its owner's end."""
    flags = _flags(held)
    changes = (flags ^ table.flags) & ~DORMANT
    return (not changes or (changes == OWNER and bool(flags & PERSIST) and bool(table.flags & OWNER))) and (
        same_attributes({**table.attributes(), 2: b""}, {**held.attributes, 2: b""}))


def _holds(table: Table, held: HeldTable, item: Object) -> bool:
    """Return whether the kernel has *item* as it should be. Raises Replacement."""
    if isinstance(item, Chain):
        found = held.chains.get(item.name)
        if found is None:
            return False
        wanted = chain_attributes(item, table.family)
        if not same_attributes({**found, _POLICY: b""}, {**wanted, _POLICY: b""}):
            raise Replacement
        if not same_attributes(found, wanted):
            return False
        rules = held.rules.get(item.name, [])
        return len(rules) == len(item.rules) and all(map(HeldRule.equals, rules, item.rules))
    if isinstance(item, Container):
        kept = held.containers.get(item.name)
        if kept is None:
            return False
        if not same_attributes(kept, container_attributes(item)):
            raise Replacement
        return item.constant is None or held.elements.get(item.name) == frozenset(constant_elements(item))
    flowtable = held.flowtables.get(item.name)
    return flowtable is not None and sorted(flowtable.devices) == sorted(item.devices)


def unwanted(held: HeldTable, wanted: Collection[str]) -> list[Leftover]:
    """Return the objects of *held* that are not *wanted*.

    Other processes chose their names: see `is_quotable` before their commands are used as text.
    """
    chains = [Chain(name) for name in sorted(held.chains) if name not in wanted]
    containers = [Container(name, ()) for name in sorted(held.containers) if name not in wanted]
    flowtables = [each for name, each in held.flowtables.items() if name not in wanted]
    return [*chains, *containers, *flowtables, *held.stateful]


is_quotable = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*").fullmatch
"""Matches the names that nft's text can hold, as all of ours; the kernel takes any."""


def completion(
    table: Table, layout: Layout, contents: Mapping[str, Collection[Element]], held: HeldTable | None
) -> list[Command]:
    """Return the commands that bring *held* to *layout*, or replace it if it cannot be brought over.

    *contents* are the elements of containers, by name; *held* must have those, too. Elements of other
    containers, such as counts, are kept. Unwanted objects are deleted.
    """
    try:
        commands = difference(table, layout, held)
    except Replacement:
        return rewrite(table, layout, contents)
    if held is not None:
        commands += table.remove(unwanted(held, layout))
    return [*commands, *_changes(table, layout, contents, held.elements if held is not None else {})]


def rewrite(
    table: Table, layout: Layout, contents: Mapping[str, Collection[Element]]
) -> list[Command]:
    """Return the commands that replace *table*, whatever it holds, if it exists."""
    return [*table.replace(layout.values()), *_changes(table, layout, contents, {})]


def _changes(
    table: Table, layout: Layout, contents: Mapping[str, Collection[Element]],
    held: Mapping[str, Collection[Element]],
) -> Iterator[Command]:
    for name, wanted in contents.items():
        container = layout[name]
        assert isinstance(container, Container)
        yield from table.change_elements(container, held.get(name, ()), wanted)


# Changes of many elements.

MOST_ELEMENTS = 1 << 15
"""Limit for the elements of one transaction. The kernel grows a hash table between transactions, so in a
large one each further element takes longer: 250,000 take 2.7 s at once and 0.6 s in such parts."""


def element_changes(
    table: Table, deletes: Sequence[PlainElement], adds: Sequence[PlainElement], *,
    limit: int, most: int = MOST_ELEMENTS, ranks: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[list[NetlinkRequest]]:
    """Yield the requests that delete and add elements, by transaction; at least one transaction.

    One transaction, deletions first, unless it would exceed *limit* bytes or *most* elements. For packets, a
    key that is deleted and added in one transaction is replaced atomically. Therefore a split keeps the
    deletion and the addition of a key in the same transaction. It adds elements of containers with higher
    *ranks* after others, and deletes them before: a container not in *ranks* has 0.
    """
    if len(deletes) + len(adds) <= most:
        requests = [*_requests(table, DELSETELEM, deletes), *_requests(table, NEWSETELEM, adds)]
        if sum(len(request.payload) for request in requests) + (len(requests) + 2) * _HEADERS <= limit:
            yield requests
            return

    def rank(element: PlainElement) -> int:
        return ranks.get(element[0], 0)

    step = max(1, min(limit // _LARGEST_ELEMENT, most))
    by_key = {element[:2]: element for element in deletes}
    ordered = sorted(adds, key=rank)
    for start in range(0, len(ordered), step):
        part = ordered[start : start + step]
        replaced = [by_key.pop(e[:2]) for e in part if e[:2] in by_key]
        yield [*_requests(table, DELSETELEM, replaced), *_requests(table, NEWSETELEM, part)]
    rest = sorted(by_key.values(), key=rank, reverse=True)
    for start in range(0, len(rest), step):
        yield list(_requests(table, DELSETELEM, rest[start : start + step]))


_HEADERS = 20
"""Bytes of nlmsghdr and nfgenmsg, with which every message begins."""
_LARGEST_ELEMENT = 1024
"""Limit in bytes for the deletion and the addition of an element, whose verdict may name a chain."""


def _requests(table: Table, kind: int, elements: Sequence[PlainElement]) -> Iterator[NetlinkRequest]:
    """Yield the requests about *elements*, grouped by container."""
    by_container: dict[str, list[PlainElement]] = defaultdict(list)
    for element in elements:
        by_container[element[0]].append(element)
    for container, members in by_container.items():
        keys = [key for _, key, _ in members]
        data = [value for _, _, value in members] if kind == NEWSETELEM else [None] * len(members)
        for list_ in plain_lists(keys, data):
            yield element_request(table.family, table.name, container, kind, list_)


class TransactionRefused(OSError):
    """The kernel refused a transaction, and did nothing of it."""

    def __init__(self, command: Command, error: OSError) -> None:
        super().__init__(error.errno, f"nf_tables refuses '{command.text}': {error.strerror}")

    def __str__(self) -> str:
        return str(self.strerror)


class RulesetSocket(Reader):
    """A netlink socket to nf_tables in the network namespace of the thread that opened it.

    Transactions are thread-safe, reads are not.
    """

    def __init__(self, sock: NetlinkSocket) -> None:
        super().__init__(sock)
        self._lock = Lock()

    @classmethod
    def open(cls) -> Self:
        """Raises OSError."""
        return cls(NetlinkSocket.open(
            NETLINK_NETFILTER, receive_space=_RECEIVE_SPACE, send_space=_SEND_SPACE))  # fmt: skip

    def run(self, commands: Sequence[Command], more: Sequence[NetlinkRequest] = ()) -> None:
        """Run *commands* and then *more* requests as one transaction.

        Raises TransactionRefused, naming the refused command; OSError if the kernel refuses a request.
        """
        if commands or more:
            self.send(self.encode(commands, more), commands)

    def check(self, commands: Sequence[Command]) -> None:
        """Have the kernel check *commands*, without running them. Raises TransactionRefused, OSError."""
        self.send(transaction([command.request for command in commands], commit=False), commands)

    @staticmethod
    def encode(commands: Sequence[Command], more: Sequence[NetlinkRequest]) -> tuple[bytes, int]:
        """Encode a transaction, with the sequence number that is acknowledged."""
        return transaction([*(command.request for command in commands), *more])

    def send(self, encoded: tuple[bytes, int], commands: Sequence[Command]) -> None:
        """Run an *encoded* transaction that begins with *commands*. Raises as `run`."""
        with self._lock:
            refused = self.socket.transact(*encoded)
        if not refused:
            return
        number, error = refused[0].number - _FIRST_SEQUENCE, refused[0].error
        if 0 <= number < len(commands):
            raise TransactionRefused(commands[number], error) from error
        raise error

    def complete(
        self, table: Table, layout: Layout, contents: Mapping[str, Collection[Element]]
    ) -> None:
        """Bring *table* to *layout*; see `completion`. If it cannot be read or corrected, replace it.

        Raises TransactionRefused, OSError.
        """
        try:
            held = self.read(table.family, table.name, contents)
            self.run(completion(table, layout, contents, held))
        except (TransactionRefused, Malformed) as reason:
            log.warning("replacing table that cannot be corrected", extra={
                "fields": {"table": table.where, "error": str(reason)}})
            self.run(rewrite(table, layout, contents))


class _Shared(NamedTuple):
    connection: RulesetSocket
    users: list[object]


_shared: dict[Hashable, _Shared] = {}
"""The connection of each network namespace that this process writes to."""
_sharing = Lock()


class Writer:
    """A share in the socket by which this process changes the tables of a network namespace.

    All backends share one: only the socket that claimed an owned table can change it, not another one of the
    same process. The table is free again when the last share is closed.
    """

    def __init__(self) -> None:
        """Open a share for the calling thread's namespace. Raises OSError."""
        self._namespace = kernel().namespace()
        with _sharing:
            if self._namespace not in _shared:
                _shared[self._namespace] = _Shared(RulesetSocket.open(), [])
            self.connection, users = _shared[self._namespace]
            users.append(self)

    def close(self) -> None:
        with _sharing:
            found = _shared[self._namespace]
            found.users.remove(self)
            if not found.users:
                del _shared[self._namespace]
                self.connection.close()


