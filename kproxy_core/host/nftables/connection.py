"""A socket to nf_tables: transactions of commands, and tables read back."""

import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple, Self, TypeVar

from kproxy_core.host.errors import HostError, doing
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    Request,
    Span,
    attributes,
    text,
    text_attribute,
)
from kproxy_core.host.netlink.nf_tables import (
    GETCHAIN,
    GETFLOWTABLE,
    GETRULE,
    GETSET,
    GETTABLE,
    KIND,
    TABLE_OWNER,
    payload,
    transaction,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.nftables.objects import (
    Command,
    Element,
    HeldRule,
    HeldTable,
    check_complete,
    parse_elements,
    parse_flowtable,
    parse_rule,
)
from kproxy_core.host.nftables.rules import Attributes
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import Family

T = TypeVar("T")

_GETSETELEM = KIND | 13
_FIRST_SEQUENCE = 2
"""Sequence number of the first request of a transaction, after its beginning."""
_TABLE_NAME = 1
_TABLE_ATTRIBUTES, _CHAIN_ATTRIBUTES = (2, 6), (4, 5, 7)
_CONTAINER_ATTRIBUTES = (3, 4, 5, 6, 7, 9, 11, 13)
_COUNT = 20
"""NFTA_SET_COUNT: the number of elements."""
ABSENT = (errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT)
"""No such object, a kernel without nf_tables, a kernel without netfilter's netlink (nfnetlink.c)."""

_SEND_SPACE = 256 << 20
"""Bytes of one transaction that we ask the kernel to take; only a bound, nothing is reserved."""
_RECEIVE_SPACE = 8 << 20


class Refused(HostError):
    """The kernel refused a transaction, so that nothing of it was done."""


class Connection:
    """A socket to nf_tables in the network namespace of the thread that opened it.

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
        """Open a connection to do *what*; its changes are those of *own*.

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

    def run(self, commands: Sequence[Command], more: Sequence[Request] = ()) -> None:
        """Run *commands* and then *more* requests as one transaction.

        Raises Refused, which names the command that the kernel refuses; OSError if it refuses a request.
        """
        if commands or more:
            self.send(self.encode(commands, more), commands)

    def check(self, commands: Sequence[Command]) -> None:
        """Have the kernel check *commands*, without running them. Raises Refused, OSError."""
        self.send(transaction([command.request for command in commands], commit=False), commands)

    @staticmethod
    def encode(commands: Sequence[Command], more: Sequence[Request]) -> tuple[bytes, int]:
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
            raise Refused(f"nf_tables refuses '{commands[number].text}'", error) from error
        raise error

    def read(self, family: Family, table: str, elements_of: Collection[str] = ()) -> HeldTable | None:
        """Return the objects of *table*, and *elements_of* these containers; None without the table.

        Raises InterruptedError if the rules changed during each attempt, other OSError.
        """
        named = text_attribute(_TABLE_NAME, table)
        try:
            ((data, start, end),) = self.socket.request(GETTABLE, 0, payload(family, named))
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        rules: dict[str, list[HeldRule]] = {}
        for chain, rule in self._listed(GETRULE, family, named, parse_rule):
            rules.setdefault(chain, []).append(rule)
        containers: dict[str, Attributes] = {
            text(found[2]): {kind: found[kind] for kind in _CONTAINER_ATTRIBUTES if kind in found}
            for found in self._listed(GETSET, family, named, lambda span: attributes(*span))
        }
        found_table = attributes(data, start + NFGENMSG.size, end)
        return HeldTable(
            attributes={kind: value for kind, value in found_table.items() if kind in _TABLE_ATTRIBUTES},
            chains={
                text(found[3]): {kind: found[kind] for kind in _CHAIN_ATTRIBUTES if kind in found}
                for span in self._of_table(GETCHAIN, family, table) for found in [attributes(*span)]
            },
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
        )  # fmt: skip

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
        return {
            text(found[2]): int.from_bytes(found[_COUNT], "big")
            for found in self._listed(GETSET, family, named, lambda span: attributes(*span))
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
    connection: Connection
    users: list[object]


_shared: dict[int, _Shared] = {}
"""The connection of each network namespace that this process writes to, by the namespace's inode."""
_sharing = Lock()


class Writer:
    """A share in the connection by which this process changes the tables of a network namespace.

    There is one for all backends: an owned table can be changed by the socket that claimed it only, not by
    another one of the same process. The table is free again when the last share is closed.
    """

    def __init__(self) -> None:
        """Open a share for the calling thread's namespace. Raises OSError."""
        self._namespace = os.stat("/proc/thread-self/ns/net").st_ino
        with _sharing:
            if self._namespace not in _shared:
                _shared[self._namespace] = _Shared(Connection.open(), [])
            self.connection, users = _shared[self._namespace]
            users.append(self)

    def close(self) -> None:
        with _sharing:
            found = _shared[self._namespace]
            found.users.remove(self)
            if not found.users:
                del _shared[self._namespace]
                self.connection.close()
