"""nf_tables over netlink: transactions, tables read back, and announced commits
(linux/netfilter/nf_tables.h).
"""

import enum
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final, NamedTuple, Self, TypeVar

from kproxy_core.linux import messages
from kproxy_core.linux import messages as netlink
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.messages import (
    GETCHAIN,
    GETFLOWTABLE,
    GETRULE,
    GETSET,
    GETTABLE,
    KIND,
    NETLINK_NETFILTER,
    NFGENMSG,
    TABLE_OWNER,
    Malformed,
    NetlinkRequest,
    Span,
    attributes,
    decoding,
    payload,
    text,
    text_attribute,
    transaction,
)
from kproxy_core.linux.netlink import NetlinkSocket, NotificationThread
from kproxy_core.linux.nft_rules import Attributes
from kproxy_core.linux.nft_tables import (
    CATCH_ALL_LIST,
    Command,
    Element,
    HeldRule,
    HeldTable,
    Layout,
    StatefulObject,
    Table,
    check_complete,
    completion,
    parse_elements,
    parse_flowtable,
    parse_rule,
    rewrite,
)
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.model.address import FAMILY_BY_AF, Family

T = TypeVar("T")

log = logging.getLogger("kproxy.host")

_GETSETELEM, _GETOBJ = KIND | 13, KIND | 19
_FIRST_SEQUENCE = 2
"""Sequence number of the first request of a transaction, after its beginning."""
_TABLE_NAME = 1
_CHAIN_NAME = 3
_TABLE_ATTRIBUTES, _CHAIN_ATTRIBUTES = (2, 6), (4, 5, 7)
_CONTAINER_ATTRIBUTES = (3, 4, 5, 6, 7, 9, 11, 13)
_SET_FLAGS, _CHAIN_FLAGS = 3, 10
_ANONYMOUS, _BINDING = 1, 4
"""NFT_SET_ANONYMOUS and NFT_CHAIN_BINDING: the object is deleted with the rule that refers to it."""
_OBJECT_TYPE = 3
_COUNT = 20
"""NFTA_SET_COUNT: the number of elements."""
ABSENT = (errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT)
"""No such object, a kernel without nf_tables, a kernel without netfilter's netlink (nfnetlink.c)."""

_SEND_SPACE = 256 << 20
"""Limit in bytes for one transaction. The kernel reserves nothing for it."""
_RECEIVE_SPACE = 8 << 20
"""Limit in bytes for pending messages. If a foreign flush announces more, the loss is noticed instead."""

_COMMITS_GROUP = 7  # NFNLGRP_NFTABLES
_NEWGEN, _GETGEN = 15, 16
_GEN_ID, _GEN_PID, _GEN_NAME = 1, 2, 3


class TransactionRefused(HostError):
    """The kernel refused a transaction, and did nothing of it."""


class RulesetSocket:
    """A netlink socket to nf_tables in the network namespace of the thread that opened it.

    Transactions are thread-safe, reads are not.
    """

    def __init__(self, sock: NetlinkSocket) -> None:
        self.socket = sock
        self._lock = Lock()

    @classmethod
    def open(cls) -> Self:
        """Raises OSError."""
        return cls(NetlinkSocket.open(
            NETLINK_NETFILTER, receive_space=_RECEIVE_SPACE, send_space=_SEND_SPACE))  # fmt: skip

    @classmethod
    @contextmanager
    def to(cls, what: str, own: OwnProcesses | None = None) -> Iterator[Self]:
        """Open a socket to do *what*; its changes are those of *own*.

        Turns an OSError into a HostError: cannot do *what*.
        """
        with doing(what), cls.open() as connection:
            if own is not None:
                with own.starting():
                    own.remember(connection.socket.port)
            yield connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

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
            raise TransactionRefused(f"nf_tables refuses '{commands[number].text}'", error) from error
        raise error

    def read(self, family: Family, table: str, elements_of: Collection[str] = ()) -> HeldTable | None:
        """Return the objects of *table*, and *elements_of* these containers; None without the table.

        Raises InterruptedError if the rules changed during each attempt, Malformed, other OSError.
        """
        named = text_attribute(_TABLE_NAME, table)
        try:
            data, start, end = self.socket.request_one(GETTABLE, payload(family, named))
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        rules: dict[str, list[HeldRule]] = {}
        for chain, rule in self._listed(GETRULE, family, named, parse_rule):
            rules.setdefault(chain, []).append(rule)
        found_table = attributes(data, start + NFGENMSG.size, end)
        containers = _by_name(
            2, self._listed(GETSET, family, named, _attributes), _CONTAINER_ATTRIBUTES,
            _SET_FLAGS, _ANONYMOUS)
        return HeldTable(
            attributes={kind: value for kind, value in found_table.items() if kind in _TABLE_ATTRIBUTES},
            chains=_by_name(
                3, map(_attributes, self._of_table(GETCHAIN, family, table)), _CHAIN_ATTRIBUTES,
                _CHAIN_FLAGS, _BINDING),
            rules=rules,
            containers=containers,
            elements={
                name: self.elements(family, table, name) for name in elements_of if name in containers},
            flowtables={
                flowtable.name: flowtable
                for span in self._of_table(GETFLOWTABLE, family, table)
                for flowtable in [parse_flowtable(span)]
            },
            owner=int.from_bytes(found_table.get(TABLE_OWNER, b""), "big"),
            stateful=self._listed(_GETOBJ, family, named, parse_stateful_object),
            catch_alls=[
                name for name in containers
                if name not in elements_of and self._has_catch_all(family, table, name)],
        )  # fmt: skip

    def _has_catch_all(self, family: Family, table: str, name: str) -> bool:
        of = text_attribute(_TABLE_NAME, table) + text_attribute(2, name) + CATCH_ALL_LIST
        try:
            return bool(self.socket.request(_GETSETELEM, 0, payload(family, of)))
        except OSError as error:
            if error.errno in (*ABSENT, errno.EOPNOTSUPP):
                return False
            raise

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

    def elements(self, family: Family, table: str, name: str) -> frozenset[Element]:
        """Return the elements of a set or a map; none if it does not exist.

        Raises InterruptedError if they changed during each attempt, other OSError.
        """
        of = text_attribute(1, table) + text_attribute(2, name)
        return self._dumped(_GETSETELEM, family, of, _collect_elements) or frozenset()

    def counts(self, family: Family, table: str) -> dict[str, int]:
        """Return the number of elements of each set and map of *table*; none if the kernel does not tell it.

        Raises as `elements`.
        """
        named = text_attribute(_TABLE_NAME, table)
        with decoding("a set"):
            return {
                text(found[2]): int.from_bytes(found[_COUNT], "big")
                for found in self._listed(GETSET, family, named, _attributes)
                if _COUNT in found
            }

    def _of_table(self, kind: int, family: Family, table: str) -> list[Span]:
        """Return the objects of *table*: the kernel lists those of all tables, and the table's name first."""
        named = text_attribute(_TABLE_NAME, table)

        def collect(answers: Iterator[Span]) -> list[Span]:
            return [
                (data, start + NFGENMSG.size, end) for data, start, end in answers
                if data.startswith(named, start + NFGENMSG.size)
            ]  # fmt: skip

        return self._dumped(kind, family, b"", collect) or []

    def _listed(self, kind: int, family: Family, of: bytes, parse: Callable[[Span], T]) -> list[T]:
        """Return what *parse* makes of each answer to a dump; none without its subject."""

        def collect(answers: Iterator[Span]) -> list[T]:
            return [parse((data, start + NFGENMSG.size, end)) for data, start, end in answers]

        return self._dumped(kind, family, of, collect) or []

    def _dumped(
        self, kind: int, family: Family, of: bytes, collect: Callable[[Iterator[Span]], T]
    ) -> T | None:
        """Return what *collect* makes of the answers to a dump; None without its subject."""
        try:
            return self.socket.dump(kind, payload(family, of), collect)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise


def _attributes(span: Span) -> Attributes:
    return attributes(*span)


def _by_name(
    name: int, listed: Iterable[Attributes], kept: Collection[int], flags: int, anonymous: int
) -> dict[str, Attributes]:
    """Return the *kept* attributes of *listed* objects by name, without those with the flag *anonymous*."""
    with decoding("an object"):
        return {
            text(found[name]): {kind: found[kind] for kind in kept if kind in found}
            for found in listed
            if not int.from_bytes(found.get(flags, b""), "big") & anonymous
        }


def parse_stateful_object(span: Span) -> StatefulObject:
    """Return a listed stateful object. Raises Malformed."""
    with decoding("a stateful object"):
        found = attributes(*span)
        return StatefulObject(text(found[2]), int.from_bytes(found[_OBJECT_TYPE], "big"))


def _collect_elements(answers: Iterator[Span]) -> frozenset[Element]:
    """Collect elements. Raises InterruptedError if some are missing."""
    listed = [
        element for data, start, end in answers
        for element in parse_elements((data, start + NFGENMSG.size, end))
    ]  # fmt: skip
    found = frozenset(listed)
    check_complete(len(listed), len(found))
    return found


class _Shared(NamedTuple):
    connection: RulesetSocket
    users: list[object]


_shared: dict[int, _Shared] = {}
"""The connection of each network namespace that this process writes to, by the namespace's inode."""
_sharing = Lock()


class Writer:
    """A share in the socket by which this process changes the tables of a network namespace.

    All backends share one: only the socket that claimed an owned table can change it, not another one of the
    same process. The table is free again when the last share is closed.
    """

    def __init__(self) -> None:
        """Open a share for the calling thread's namespace. Raises OSError."""
        self._namespace = os.stat("/proc/thread-self/ns/net").st_ino
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


# Lookup of tables and chains by name.

class TableName(NamedTuple):
    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``, ..."""
    name: str

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


def all_tables() -> list[TableName]:
    """Return the tables of all families; none in a kernel without nf_tables. Raises HostError."""
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return sock.dump(messages.GETTABLE, NFGENMSG.pack(0, 0, 0), lambda found: [*map(_named, found)])
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise HostError("cannot list the tables of nf_tables", error) from error


def _named(table: Span) -> TableName:
    data, start, end = table
    with decoding("a table"):
        name = attributes(data, start + NFGENMSG.size, end)[messages.TABLE_NAME]
        return TableName(messages.FAMILIES.get(data[start], "?"), text(name))


def table_exists(family: Family, table: str) -> bool:
    """Return whether *table* exists, which it does not in a kernel without nf_tables. Raises HostError."""
    return _exists(messages.GETTABLE, family, table)


def chain_exists(family: Family, table: str, chain: str) -> bool:
    """Return whether *chain* exists, as `table_exists` does. Raises HostError."""
    return _exists(messages.GETCHAIN, family, table, text_attribute(_CHAIN_NAME, chain))


def _exists(kind: int, family: Family, table: str, *attributes: bytes) -> bool:
    request = messages.payload(family, text_attribute(messages.TABLE_NAME, table), *attributes)
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return bool(sock.request(kind, 0, request))
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise HostError(f"cannot look up table {family.ip} {table}", error) from error


# Announced commits. The kernel sends the changes of a commit to the group NFNLGRP_NFTABLES, and then a
# message with the number of the commit and the process that made it.

class ChangeKind(enum.StrEnum):
    TABLE_ADDED = "table added"
    TABLE_DELETED = "table deleted"
    CHAIN_ADDED = "chain added"
    CHAIN_DELETED = "chain deleted"
    RULE_ADDED = "rule added"
    RULE_DELETED = "rule deleted"
    SET_ADDED = "set added"
    SET_DELETED = "set deleted"
    ELEMENT_ADDED = "element added"
    ELEMENT_DELETED = "element deleted"
    OBJECT_ADDED = "stateful object added"
    OBJECT_DELETED = "stateful object deleted"
    FLOWTABLE_ADDED = "flowtable added"
    FLOWTABLE_DELETED = "flowtable deleted"


_KINDS: Final = {
    0: (ChangeKind.TABLE_ADDED, 0), 2: (ChangeKind.TABLE_DELETED, 0),
    3: (ChangeKind.CHAIN_ADDED, 3), 5: (ChangeKind.CHAIN_DELETED, 3),
    6: (ChangeKind.RULE_ADDED, 2), 8: (ChangeKind.RULE_DELETED, 2),
    9: (ChangeKind.SET_ADDED, 2), 11: (ChangeKind.SET_DELETED, 2),
    12: (ChangeKind.ELEMENT_ADDED, 2), 14: (ChangeKind.ELEMENT_DELETED, 2),
    18: (ChangeKind.OBJECT_ADDED, 2), 20: (ChangeKind.OBJECT_DELETED, 2),
    22: (ChangeKind.FLOWTABLE_ADDED, 2), 24: (ChangeKind.FLOWTABLE_DELETED, 2),
}  # fmt: skip
"""By kind of message: kind of change, and the attribute with the name of the chain, set or flowtable."""


class Change(NamedTuple):
    """One kind of change to the contents of one chain, set or flowtable."""

    family: Family
    kind: ChangeKind
    table: str
    name: str
    """Of the chain, set or flowtable; "" for a table."""


class Commit(NamedTuple):
    """The changes of one commit in the families IPv4 and IPv6."""

    changes: Counter[Change]
    author: str
    """Program and process id, as ``nft[123]``; "" if the kernel names none."""

    def summary(self, concerns: Callable[[Change], bool]) -> dict[Family, str]:
        """Describe the changes that *concerns* selects, by family: ``rule deleted (3x) by nft[123]``."""
        found: dict[Family, Counter[ChangeKind]] = {}
        for change, times in self.changes.items():
            if concerns(change):
                found.setdefault(change.family, Counter())[change.kind] += times
        by = f" by {self.author}" if self.author else ""
        return {
            family: ", ".join(f"{kind} ({n}x)" if n > 1 else kind for kind, n in kinds.items()) + by
            for family, kinds in found.items()
        }


class CommitWatch(NotificationThread):
    """Passes on commits of other processes, from a thread of its own, until it is closed."""

    def __init__(
        self, name: str, own: Container[int], foreign: Callable[[Commit], None], families: Iterable[Family],
        damaged: Callable[[Family, str], None], ignore: Collection[int] = (),
    ) -> None:
        """Start watching. *own*: the netlink ports of this process, to which more may be added.

        The kernel drops notifications of the ports *ignore* itself. After it has dropped others, *damaged* is
        called for each of *families*. Raises OSError.
        """
        self._own = own
        self._foreign = foreign
        self._families = families
        self._damaged = damaged
        self._changes: Counter[Change] = Counter()
        """Those of the commit whose end has not been announced."""
        sock = NetlinkSocket.open(
            netlink.NETLINK_NETFILTER, groups=(_COMMITS_GROUP,), ignore=ignore,
            receive_space=_RECEIVE_SPACE)
        super().__init__(name, sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        if lost:
            self._changes.clear()
            for family in list(self._families):
                self._damaged(family, "notifications were lost")
        for data in datagrams:
            # The first netlink socket of a program has the process id as its port.
            if netlink.sender(data) not in self._own:
                self._read(data)

    def _read(self, data: bytes) -> None:
        """Take one datagram, and pass on each commit that it ends."""
        for kind, _, _, start, end in netlink.messages(data):
            if kind & 0xFF00 != KIND:
                continue
            attributes = start + netlink.NFGENMSG.size
            if kind & 0xFF == _NEWGEN:
                changes, self._changes = self._changes, Counter()
                self._foreign(Commit(changes, _author(netlink.attributes(data, attributes, end))))
            elif kind & 0xFF in _KINDS and start < end and data[start] in FAMILY_BY_AF:
                change = _change(FAMILY_BY_AF[data[start]], *_KINDS[kind & 0xFF], data, attributes, end)
                self._changes[change] += 1


def _change(family: Family, kind: ChangeKind, named: int, data: bytes, start: int, end: int) -> Change:
    table = name = ""
    for attribute, first, last in netlink.attribute_spans(data, start, end):
        if attribute == _TABLE_NAME:
            table = netlink.text(data[first:last])
        elif attribute == named:
            name = netlink.text(data[first:last])
            break
    return Change(family, kind, table, name)


def generation(sock: NetlinkSocket) -> int:
    """Return the number of the last commit in this network namespace. Raises OSError."""
    data, start, end = sock.request_one(KIND | _GETGEN, netlink.NFGENMSG.pack(0, 0, 0))
    with decoding("the number of the last commit"):
        return int.from_bytes(netlink.attributes(data, start + netlink.NFGENMSG.size, end)[_GEN_ID], "big")


def _author(attributes: dict[int, bytes]) -> str:
    name = netlink.text(attributes.get(_GEN_NAME, b""))
    return f"{name}[{int.from_bytes(attributes.get(_GEN_PID, b''), 'big')}]" if name else ""
