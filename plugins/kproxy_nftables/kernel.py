"""All input and output with nf_tables: text through libnftables, elements through netlink.

Errors of the kernel become typed errors here.
"""

import errno
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from kproxy_core.backend.errors import SyncFailed, TrustLost, Unsupported
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import commits
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.nf_objects import table_exists
from kproxy_core.host.netlink.nf_tables import GETCHAIN, GETFLOWTABLE, GETRULE, GETSET, GETTABLE, payload
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family
from kproxy_nft import objects
from kproxy_nft.elements import attributes_of, complete, parse_counters
from kproxy_nftables import batch
from kproxy_nftables.names import SERVICE_CIDRS, TABLE
from kproxy_nftables.wanted import Element, Value

if TYPE_CHECKING:
    from nftables import Nftables

T = TypeVar("T")

_TABLE_ATTRIBUTE = 1
_OWNER_ATTRIBUTE = 7
"""NFTA_TABLE_OWNER, since Linux 5.12: the netlink port that alone may change a table."""
_NAME_ATTRIBUTE = {GETCHAIN: 3, GETSET: 2, GETFLOWTABLE: 2}

_SEND_SPACE = 256 << 20
"""Bytes of one transaction that we ask the kernel to take; only a bound, nothing is reserved."""
_RECEIVE_SPACE = 8 << 20

BINDING_REMEDY = "install python3-nftables and run kproxy on the distribution's own python3"

_LINES = re.DOTALL | re.MULTILINE

_STALE = {errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.ENOBUFS, errno.EINTR, errno.EAGAIN}
"""Errors which mean that the kernel's state is not the one we know."""


class Kernel:
    """nf_tables in the calling thread's network namespace. Sockets are opened when first needed.

    Not thread-safe.
    """

    def __init__(self, *, check_only: bool = False) -> None:
        """With *check_only*, the kernel checks text without applying it."""
        self._check_only = check_only
        self._socket: NetlinkSocket | None = None
        self._nft: Nftables | None = None
        self.own_ports: set[int] = set()
        """Netlink port ids from which this process changes rules."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._nft = None

    def apply_text(self, text: str) -> None:
        """Run nft commands as one transaction.

        Raises SyncFailed with nft's message, Unsupported without the Python binding.
        """
        if not text:
            return
        status, _, problem = self._libnftables().cmd(text)
        self._learn_own_port()
        if status:
            raise SyncFailed(f"nft: {first_line(problem)}{self._foreign_owner(problem)}")

    def write(self, family: Family, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        """Delete and add elements in one transaction, or several if the kernel's limits require it.

        Raises TrustLost if an element was not as expected, SyncFailed for other reasons.
        """
        if not deletes and not adds:
            return
        limit = self._connection().send_limit
        for written, (data, last) in enumerate(batch.batches(family, deletes, adds, limit)):
            try:
                self._transact(data, last)
            except OSError as error:
                if written:
                    raise TrustLost(f"nf_tables, after {written} transactions: {error.strerror}") from error
                raise _failure(error) from error

    def fill(self, family: Family, parts: Iterable[Sequence[Element]]) -> int:
        """Add elements that the kernel does not hold, each part in one or more transactions. Return how many.

        A thread writes, so that the kernel takes a transaction while the next one is encoded. Raises
        TrustLost, SyncFailed.
        """
        added = 0
        taken: Future[None] | None = None
        limit = self._connection().send_limit
        try:
            with ThreadPoolExecutor(max_workers=1) as writer:
                for part in filter(None, parts):
                    added += len(part)
                    for data, last in batch.batches(family, (), part, limit):
                        if taken is not None:
                            taken.result()
                        taken = writer.submit(self._transact, data, last)
                if taken is not None:
                    taken.result()
        except OSError as error:
            raise _failure(error) from error
        return added

    def _transact(self, data: bytes, last: int) -> None:
        """Run one transaction. Raises OSError."""
        if refused := self._connection().transact(data, last):
            raise refused[0].error

    def elements(self, family: Family, container: str) -> dict[bytes, Value]:
        """Return the elements of a map, or of a set without intervals; none if it does not exist."""
        collect = partial(complete, batch.parse_elements)
        return self._dump(batch.GETSETELEM, family, batch.element_list(container), collect) or {}

    def counters(self, family: Family, container: str) -> dict[bytes, int]:
        """Return the counted packets of each element of a set; none if it does not exist."""
        collect = partial(complete, parse_counters)
        return self._dump(batch.GETSETELEM, family, batch.element_list(container), collect) or {}

    def element(self, family: Family, container: str, key: bytes) -> Value:
        """Return the value of one element of a map. Raises KeyError if it does not exist."""
        try:
            asked = payload(family, batch.one_element(container, key))
            found = self._connection().request(batch.GETSETELEM, 0, asked)
        except FileNotFoundError as error:
            raise KeyError(key) from error
        except OSError as error:
            raise _failure(error) from error
        for data, start, end in found:
            for _, value in batch.parse_elements(data, start + netlink.NFGENMSG.size, end):
                return value
        raise KeyError(key)

    def rules_text(self, family: Family) -> str:
        """Return our table as nft prints it, with handles and without elements; "" if it does not exist.

        Before nft 1.1.0, only a list of all tables leaves the elements unread.
        """
        of = family.ip
        listed = re.search(rf"^table {of} {TABLE} .*?^}}", self._listed(f"ruleset {of}", terse=True), _LINES)
        return listed[0] if listed else ""

    def table_text(self, family: Family, table: str) -> str:
        """Return a *table* as nft prints it, with handles; "" if it does not exist."""
        return self._listed(f"table {family.ip} {table}", terse=False)

    def _listed(self, what: str, *, terse: bool) -> str:
        nft = self._libnftables()
        nft.set_handle_output(True)
        nft.set_terse_output(terse)
        try:
            return str(nft.cmd(f"list {what}")[1])
        finally:
            nft.set_handle_output(False)
            nft.set_terse_output(False)

    def library_version(self) -> str:
        """Return e.g. ``libnftables 1.0.6``. Raises Unsupported without the Python binding."""
        nft = self._libnftables()
        nft.set_json_output(True)
        try:
            _, output, _ = nft.cmd("list flowtables")  # the cheapest: others read all rules of all tables
        finally:
            nft.set_json_output(False)
        match = re.search(r'"version": ?"([^"]+)"', output)
        return f"libnftables {match[1]}" if match else "libnftables"

    def has_table(self, family: Family, table: str) -> bool:
        """Return whether *table* exists; False in a kernel without nf_tables. Raises SyncFailed."""
        try:
            return table_exists(family, table)
        except HostError as error:
            raise SyncFailed(str(error)) from error

    def unwanted(self, family: Family, wanted: Collection[str]) -> tuple[set[str], set[str], set[str]]:
        """Return chains, maps and sets, and flowtables of our table by name, without *wanted* ones."""
        chains, containers, flowtables = (
            self._names(kind, family).difference(wanted) for kind in _NAME_ATTRIBUTE)
        return chains, {name for name in containers if not objects.is_anonymous(name)}, flowtables

    def devices(self) -> set[str]:
        """Return the names of all network devices."""
        return {name for _, name in socket.if_nameindex()}

    def fingerprint(self, family: Family, wanted: Collection[str]) -> bytes:
        """Return a digest of our table's chains, rules, maps and sets named in *wanted*.

        The elements of maps and sets are left out, except those that belong to the constant rules.
        """
        found: list[objects.Object] = []
        for kind in objects.KINDS:
            lists_by_table = kind in (GETRULE, GETSET)
            of_table = netlink.text_attribute(_TABLE_ATTRIBUTE, TABLE) if lists_by_table else b""
            found += objects.parse_objects(kind, self._objects(kind, family, of_table), TABLE, wanted)
        constant = [SERVICE_CIDRS, *(item.name for item in found if objects.is_anonymous(item.name))]
        for name in constant:
            elements = sorted(
                (key, str(value))
                for span in self._objects(batch.GETSETELEM, family, batch.element_list(name))
                for key, value in batch.parse_elements(*span)
            )
            found.append(objects.Object(batch.GETSETELEM, name, repr(elements).encode()))
        return objects.fingerprint(found)

    def generation(self) -> int:
        """Return the number of the last commit by any process in this network namespace."""
        try:
            return commits.generation(self._connection())
        except OSError as error:
            raise _failure(error) from error

    def _foreign_owner(self, problem: str) -> str:
        """Return words about the process that owns our table, if that explains nft's message *problem*."""
        if os.strerror(errno.EPERM) not in problem:
            return ""
        for family in Family:
            for span in self._objects(GETTABLE, family, b""):
                found = netlink.attributes(*span)
                port = int.from_bytes(found.get(_OWNER_ATTRIBUTE, b""), "big")
                if port and port not in self.own_ports and netlink.text(found[_TABLE_ATTRIBUTE]) == TABLE:
                    return f"; table {family.ip} {TABLE} is owned by another process{_name_of(port)}"
        return ""

    def _names(self, kind: int, family: Family) -> set[str]:
        of_table = netlink.text_attribute(_TABLE_ATTRIBUTE, TABLE) if kind == GETSET else b""
        found = set()
        for span in self._objects(kind, family, of_table):
            named = netlink.attributes(*span)
            if netlink.text(named[_TABLE_ATTRIBUTE]) == TABLE:
                found.add(netlink.text(named[_NAME_ATTRIBUTE[kind]]))
        return found

    def _objects(self, kind: int, family: Family, of: bytes) -> list[netlink.Span]:
        """Return the attributes of every answer to a dump request; none if its subject does not exist."""
        return self._dump(kind, family, of, lambda answers: list(map(attributes_of, answers))) or []

    def _dump(
        self, kind: int, family: Family, of: bytes, collect: Callable[[Iterator[netlink.Span]], T]
    ) -> T | None:
        """Return *collect*'s result for the answers to a request; None if its subject does not exist."""
        try:
            return self._connection().dump(kind, payload(family, of), collect)
        except FileNotFoundError:
            return None
        except InterruptedError as error:
            raise TrustLost("the rules changed during every attempt to read them") from error
        except OSError as error:
            raise _failure(error) from error

    def _connection(self) -> NetlinkSocket:
        if self._socket is None:
            self._socket = NetlinkSocket.open(
                netlink.NETLINK_NETFILTER, receive_space=_RECEIVE_SPACE, send_space=_SEND_SPACE
            )
            self.own_ports.add(self._socket.port)
        return self._socket

    def _libnftables(self) -> "Nftables":
        if self._nft is None:
            try:
                from nftables import Nftables
            except (ImportError, OSError) as error:
                raise Unsupported(
                    f"the nftables Python binding is missing ({error}); {BINDING_REMEDY}"
                ) from error
            self._nft = Nftables()
            if self._check_only:
                self._nft.set_dry_run(True)
        return self._nft

    def _learn_own_port(self) -> None:
        """Record the port id of libnftables' socket, which it binds with its first command and may reopen."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if (duplicate.family, duplicate.proto) == (socket.AF_NETLINK, netlink.NETLINK_NETFILTER):
                        self.own_ports.add(duplicate.getsockname()[0])
            except OSError:
                continue


def first_line(text: str | None) -> str:
    """Return the first line of nft's message that is not empty."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "no reason given")


def _failure(error: OSError) -> SyncFailed:
    kind = TrustLost if error.errno in _STALE else SyncFailed
    return kind(f"nf_tables: {error.strerror}")


def _name_of(port: int) -> str:
    """Return name and id of a process by its first netlink socket, whose port is the process id."""
    try:
        return f", {Path(f'/proc/{port}/comm').read_text(errors='replace').strip()}[{port}]"
    except OSError:
        return f" (netlink port {port})"
