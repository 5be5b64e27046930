"""Input and output of the mode: nf_tables over netlink, with typed errors."""

import errno
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Self

from kproxy_core.contract import Family, HostError, SyncFailed, TrustLost
from kproxy_core.linux.rulesets import table_exists
from kproxy_core.netlink.messages import NetlinkRequest
from kproxy_core.netlink.sockets import RequestError
from kproxy_core.nft.elements import Found, PlainElement
from kproxy_core.nft.listing import HeldTable
from kproxy_core.nft.messages import Command, transaction
from kproxy_core.nft.objects import Table
from kproxy_core.nft.ruleset import ListedRuleset
from kproxy_core.nft.transaction import (
    MOST_ELEMENTS,
    RulesetSocket,
    TransactionRefused,
    Writer,
    element_changes,
)
from kproxy_core.nft.watch import generation
from kproxy_nftables.names import RANKS, TABLE

_STALE = {errno.ENOENT, errno.EEXIST, errno.ENOBUFS, errno.EINTR, errno.EAGAIN}
"""Errors besides EBUSY which mean that the kernel's state is not the acknowledged one."""


class ForeignOwner(SyncFailed):
    """Another process owns our table, and only that process can change it."""


class Busy(TrustLost):
    """An object is in use. Kernels before 6.2 report this for a moment after its last use."""


class Kernel:
    """nf_tables in the calling thread's network namespace. Sockets are opened when first needed.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._opened: RulesetSocket | None = None
        self._writer: Writer | None = None
        self.own_ports: set[int] = set()
        """Netlink port ids from which this process changes rules."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def run(self, commands: Sequence[Command]) -> None:
        """Run *commands* as one transaction. Raises SyncFailed, TrustLost."""
        with self._failures_named():
            self._writing().run(commands)

    def check(self, commands: Sequence[Command]) -> None:
        """Have the kernel check *commands*, without running them. Raises SyncFailed."""
        with self._failures_named():
            self._connection().check(commands)

    def write(
        self, family: Family, deletes: Sequence[PlainElement], adds: Sequence[PlainElement],
        commands: Sequence[Command] = (), *, whole: bool = False,
    ) -> None:
        """Run *commands*, then delete and add elements, in one transaction.

        Splits it if the kernel's limits require that; with *whole*, only if the socket's limit does. Raises
        TrustLost if an element was not as expected, SyncFailed for other reasons.
        """
        connection = self._writing()
        most = len(deletes) + len(adds) if whole else MOST_ELEMENTS
        limit = connection.socket.send_limit - sum(len(command.request.payload) + 16 for command in commands)
        parts = _changes(family, deletes, adds, limit, most)
        with self._failures_named():
            for written, part in enumerate(parts):
                try:
                    connection.run(commands if not written else (), part)
                except OSError as error:
                    if written:
                        raise TrustLost(
                            f"nf_tables, after {written} transactions: {error.strerror}") from error
                    raise

    def fill(
        self, family: Family, parts: Iterable[Sequence[PlainElement]], commands: Sequence[Command]
    ) -> int:
        """Run *commands*, then add elements that the kernel does not hold, in transactions for each part.

        The first part includes the commands. Return the number of elements. A thread writes, so that the
        kernel processes a transaction while the next one is encoded. Raises TrustLost, SyncFailed.
        """
        added = 0
        taken: Future[None] | None = None
        connection = self._writing()
        limit = connection.socket.send_limit
        with self._failures_named(), ThreadPoolExecutor(max_workers=1) as writer:
            for part in parts:
                added += len(part)
                for requests in _changes(family, (), part, limit):
                    if not requests and not commands:
                        continue
                    data = connection.encode(commands, requests)
                    if taken is not None:
                        taken.result()
                    taken = writer.submit(connection.send, data, commands)
                    commands = ()
            if taken is not None:
                taken.result()
        return added

    def counts(self, family: Family) -> dict[str, int]:
        """Return the number of elements of each of our sets and maps; {} if the kernel does not report it."""
        with self._failures_named():
            return self._connection().counts(family, TABLE)

    def holds_only(
        self, family: Family, parts: Iterable[Sequence[PlainElement]], counts: Mapping[str, int]
    ) -> bool:
        """Return whether the kernel holds exactly the elements of all *parts*, by their *counts*.

        The kernel checks, without doing it, that it could delete them, so they exist, and add them again, so
        their values are the same. The time for a dump is quadratic in a map's elements, because the kernel
        starts from the first one for each 32 KiB. Raises TrustLost, SyncFailed.
        """
        generation, sock = self.generation(), self._connection().socket
        others = Counter(counts)
        before: Sequence[PlainElement] = ()
        checked: Future[list[RequestError]] | None = None
        with self._failures_named(), ThreadPoolExecutor(max_workers=1) as checker:
            for part in chain(parts, [()]):
                others.subtract(container for container, _, _ in part)
                # Not both of one part: the addition would not find the deleted elements.
                most = len(before) + len(part)
                for requests in _changes(family, before, part, sock.send_limit, most):
                    if not requests:
                        continue
                    data = transaction(requests, commit=False)
                    if checked is not None and checked.result():
                        return False
                    checked = checker.submit(sock.transact, *data)
                before = part
            if checked is not None and checked.result():
                return False
        return not any(others.values()) and self.generation() == generation

    @contextmanager
    def ruleset(self, *, for_many: bool) -> Iterator[ListedRuleset]:
        """Read the rules of all programs, and elements *for_many* packets. Raises TrustLost, SyncFailed."""
        with self._failures_named():
            yield ListedRuleset(self._connection().socket, for_many=for_many)

    def elements(self, family: Family, container: str, table: str = TABLE) -> dict[bytes, Found]:
        """Return the elements of a map, or of a set without intervals; none if it does not exist."""
        with self._failures_named():
            return self._connection().plain_elements(family, table, container)

    def counters(self, family: Family, container: str) -> dict[bytes, int]:
        """Return the counted packets of each element of a set; none if it does not exist."""
        with self._failures_named():
            return self._connection().packets(family, TABLE, container)

    def element(self, family: Family, container: str, key: bytes) -> Found:
        """Return what is found at a key of a map. Raises KeyError if it does not exist."""
        with self._failures_named():
            return self._connection().element(family, TABLE, container, key)

    def holds(self, family: Family, container: str, key: bytes) -> bool:
        """Return whether a map has an element."""
        try:
            self.element(family, container, key)
        except KeyError:
            return False
        return True

    def has_table(self, family: Family, table: str) -> bool:
        """Return whether *table* exists; False in a kernel without nf_tables. Raises SyncFailed."""
        try:
            return table_exists(family, table)
        except HostError as error:
            raise SyncFailed(str(error)) from error

    def held(self, family: Family, constant: Collection[str]) -> HeldTable | None:
        """Return our table without elements, except those of *constant* sets; None if it does not exist.

        Raises TrustLost, SyncFailed.
        """
        with self._failures_named():
            return self._connection().read(family, TABLE, constant)

    def check_owner(self, family: Family, held: HeldTable) -> None:
        """Raise ForeignOwner if another process owns our table, even if its content is as wanted."""
        if held.owner and held.owner != self._writing().socket.port:
            raise ForeignOwner(_owned(family, held.owner))

    def devices(self) -> set[str]:
        """Return the names of all network devices."""
        return {name for _, name in socket.if_nameindex()}

    def generation(self) -> int:
        """Return the number of the last commit by any process in this network namespace."""
        with self._failures_named():
            return generation(self._connection().socket)

    def _foreign_owner(self, refused: TransactionRefused) -> str:
        """Describe the foreign owner of our table that *refused* names; "" if it has none."""
        for family in Family:
            if f" {family.ip} {TABLE}" not in str(refused):
                continue
            with self._failures_named():
                found = self._connection().tables(family).get(TABLE)
            if found is not None and found.owner and found.owner not in self.own_ports:
                return _owned(family, found.owner)
        return ""

    def _connection(self) -> RulesetSocket:
        if self._opened is None:
            with self._failures_named():
                self._opened = RulesetSocket.open()
        return self._opened

    def _writing(self) -> RulesetSocket:
        if self._writer is None:
            with self._failures_named():
                self._writer = Writer()
            self.own_ports.add(self._writer.connection.socket.port)
        return self._writer.connection

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """Turn errors of the kernel into SyncFailed, or TrustLost."""
        try:
            yield
        except InterruptedError as error:
            raise TrustLost("the rules changed during every attempt to read them") from error
        except TransactionRefused as refused:
            if refused.errno == errno.EPERM and (owner := self._foreign_owner(refused)):
                raise ForeignOwner(f"{refused}; {owner}") from refused
            raise _kind(refused.errno)(str(refused)) from refused
        except OSError as error:
            raise _failure(error) from error


def _changes(
    family: Family, deletes: Sequence[PlainElement], adds: Sequence[PlainElement], limit: int,
    most: int = MOST_ELEMENTS,
) -> Iterator[list[NetlinkRequest]]:
    return element_changes(Table(family, TABLE), deletes, adds, limit=limit, most=most, ranks=RANKS)


def _failure(error: OSError) -> SyncFailed:
    return _kind(error.errno)(f"nf_tables: {error.strerror}")


def _kind(number: int | None) -> type[SyncFailed]:
    if number == errno.EBUSY:
        return Busy
    return TrustLost if number in _STALE else SyncFailed


def _owned(family: Family, port: int) -> str:
    return f"table {family.ip} {TABLE} is owned by another process{_name_of(port)}"


def _name_of(port: int) -> str:
    """Return name and id of a process by its first netlink socket, whose port is the process id."""
    try:
        return f", {Path(f'/proc/{port}/comm').read_text(errors='replace').strip()}[{port}]"
    except OSError:
        return f" (netlink port {port})"
