"""The port to nf_tables: text through libnftables, elements through a netlink socket of our own.

Everything that touches the kernel is here, and so is the translation of its errors.
"""

import errno
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kproxy_core.backend.errors import SyncFailed, TrustLost, Unsupported
from kproxy_core.model.address import Family
from kproxy_nftables.batch import (
    GETCHAIN,
    GETGEN,
    GETSET,
    GETSETELEM,
    GETTABLE,
    HEADER_SIZE,
    batches,
    element_list,
    parse_attributes,
    parse_elements,
    request,
    text_attribute,
)
from kproxy_nftables.names import NFT_FAMILY, TABLE
from kproxy_nftables.wanted import Element, Value

if TYPE_CHECKING:
    from nftables import Nftables

NETLINK_NETFILTER = 12
SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_DUMP_INTR = 0x10
_TABLE_ATTRIBUTE = 1
_NAME_ATTRIBUTE = {GETCHAIN: 3, GETSET: 2}
_GEN_ID = 1

_SEND_SPACE = 256 << 20
"""Bytes of one transaction that we ask the kernel to take; only a bound, nothing is reserved."""
_RECEIVE_SPACE = 8 << 20
_DUMP_ATTEMPTS = 5

_HEADER = struct.Struct("=IHHII")
_ERROR = struct.Struct("=i")

BINDING_REMEDY = "install python3-nftables and run kproxy on the distribution's own python3"

_STALE = {errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.ENOBUFS, errno.EINTR, errno.EAGAIN}
"""Answers which mean that the kernel holds something else than we believe."""


class Kernel:
    """nf_tables of the calling thread's network namespace.

    Used from one thread. Opens nothing before it is needed.
    """

    def __init__(self, *, check_only: bool = False) -> None:
        """*check_only*: text is checked by the kernel, but nothing of it is kept."""
        self._check_only = check_only
        self._socket: socket.socket | None = None
        self._limit = 0
        self._nft: Nftables | None = None
        self._sequence = 1
        self.own_ports: set[int] = set()
        """Netlink port ids under which this process changes rules."""

    def close(self) -> None:
        """Close the sockets."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._nft = None

    def apply_text(self, text: str) -> None:
        """Run nft commands as one transaction.

        Raises SyncFailed with nft's words, Unsupported without the Python binding.
        """
        if not text:
            return
        status, _, problem = self._libnftables().cmd(text)
        self._learn_own_port()
        if status:
            raise SyncFailed(f"nft: {first_line(problem)}")

    def write(self, family: Family, deletes: Sequence[Element], adds: Sequence[Element]) -> None:
        """Delete and add elements in one transaction (several if the kernel's limits ask for it).

        Raises TrustLost where an element was not as expected, SyncFailed for the rest.
        """
        if not deletes and not adds:
            return
        connection = self._connection()
        for written, (data, acknowledged) in enumerate(batches(family, deletes, adds, self._limit)):
            try:
                connection.send(data)
                self._await(connection, acknowledged)
            except OSError as error:
                if written:
                    raise TrustLost(f"nf_tables, after {written} transactions: {error.strerror}") from error
                raise _failure(error) from error

    def elements(self, family: Family, container: str) -> Iterator[tuple[bytes, Value]]:
        """All elements of a map or set, in no order; nothing if it does not exist."""
        for data, start, end in self._dump(GETSETELEM, family, element_list(container)):
            yield from parse_elements(data, start, end)

    def library_version(self) -> str:
        """What the text is run by, e.g. ``libnftables 1.0.6``. Raises Unsupported without the binding."""
        nft = self._libnftables()
        nft.set_json_output(True)
        try:
            _, output, _ = nft.cmd("list flowtables")  # the cheapest: others read all rules of all tables
        finally:
            nft.set_json_output(False)
        match = re.search(r'"version": ?"([^"]+)"', output)
        return f"libnftables {match[1]}" if match else "libnftables"

    def tables(self) -> set[tuple[str, str]]:
        """(family, name) of every table; none where the kernel has no nf_tables."""
        found: set[tuple[str, str]] = set()
        for family in Family:
            for data, start, end in self._dump(GETTABLE, family, b""):
                for attribute, value, value_end in parse_attributes(data, start, end):
                    if attribute == _TABLE_ATTRIBUTE:
                        name = data[value : value_end - 1].decode(errors="replace")
                        found.add((NFT_FAMILY[family], name))
        return found

    def chains(self, family: Family) -> set[str]:
        """Names of the chains in our table."""
        return self._names(GETCHAIN, family)

    def containers(self, family: Family) -> set[str]:
        """Names of the maps and sets in our table, anonymous ones excepted."""
        return {name for name in self._names(GETSET, family) if not name.startswith("__")}

    def generation(self) -> int:
        """The number of the last commit by anybody in this network namespace."""
        connection = self._connection()
        self._sequence += 1
        connection.send(request(GETGEN, Family.IPV4, self._sequence))
        data = connection.recv(8192)
        for kind, start, _ in parse_attributes(data, HEADER_SIZE, len(data)):
            if kind == _GEN_ID:
                return int(struct.unpack_from(">I", data, start)[0])
        raise SyncFailed("nf_tables did not tell its generation")

    def _names(self, kind: int, family: Family) -> set[str]:
        found: set[str] = set()
        payload = text_attribute(_TABLE_ATTRIBUTE, TABLE) if kind == GETSET else b""
        for data, start, end in self._dump(kind, family, payload):
            table = name = ""
            for attribute, value, value_end in parse_attributes(data, start, end):
                if attribute == _TABLE_ATTRIBUTE:
                    table = data[value : value_end - 1].decode(errors="replace")
                elif attribute == _NAME_ATTRIBUTE[kind]:
                    name = data[value : value_end - 1].decode(errors="replace")
            if table == TABLE:
                found.add(name)
        return found

    def _dump(self, kind: int, family: Family, payload: bytes) -> list[tuple[bytes, int, int]]:
        """The messages that answer a dump request, as ranges of attributes."""
        connection = self._connection()
        for _ in range(_DUMP_ATTEMPTS):
            self._sequence += 1
            connection.send(request(kind, family, self._sequence, payload, dump=True))
            try:
                answer = self._collect(connection, self._sequence)
            except FileNotFoundError:
                return []
            except OSError as error:
                raise _failure(error) from error
            if answer is not None:
                return answer
        raise TrustLost("the rules changed during every attempt to read them")

    def _collect(self, connection: socket.socket, sequence: int) -> list[tuple[bytes, int, int]] | None:
        """One dump; None if it was interrupted by a commit."""
        found: list[tuple[bytes, int, int]] = []
        whole = True
        while True:
            data = connection.recv(1 << 17)
            at = 0
            while at + HEADER_SIZE <= len(data):
                size, kind, flags, number, _ = _HEADER.unpack_from(data, at)
                if number == sequence:
                    whole = whole and not flags & _NLM_F_DUMP_INTR
                    if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                        code = _ERROR.unpack_from(data, at + 16)[0]
                        if code < 0:
                            raise OSError(-code, os.strerror(-code))
                        return found if whole else None
                    found.append((data, at + HEADER_SIZE, at + size))
                at += (size + 3) & ~3

    def _await(self, connection: socket.socket, acknowledged: int) -> None:
        """Read the verdict on a transaction, which is there as soon as it was sent.

        Raises the OSError of its first refused message.
        """
        problem: OSError | None = None
        while True:
            try:
                data = connection.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if problem is None:
                    raise OSError(errno.ENOBUFS, "the kernel gave no answer") from None
                raise problem from None
            at = 0
            while at + 20 <= len(data):
                size, kind, _, number, _ = _HEADER.unpack_from(data, at)
                if kind == _NLMSG_ERROR:
                    code = _ERROR.unpack_from(data, at + 16)[0]
                    if code and problem is None:
                        problem = OSError(-code, os.strerror(-code))
                    elif not code and number == acknowledged and problem is None:
                        return
                at += (size + 3) & ~3

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket = open_socket()
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_SPACE)
            except PermissionError:
                # In an unprivileged user namespace: net.core.wmem_max is the limit.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_SPACE)
            self._limit = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
            self.own_ports.add(self._socket.getsockname()[0])
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
        """Note the port id of libnftables' socket, which it binds with its first command and may reopen."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    if (duplicate.family, duplicate.proto) == (socket.AF_NETLINK, NETLINK_NETFILTER):
                        self.own_ports.add(duplicate.getsockname()[0])
            except OSError:
                continue


def open_socket() -> socket.socket:
    """A netlink socket to netfilter, bound to a port id of its own, with a generous receive buffer."""
    connection = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    try:
        connection.bind((0, 0))
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_SPACE)
        except PermissionError:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_SPACE)
        # Without it every error carries the whole message that it answers.
        connection.setsockopt(SOL_NETLINK, _NETLINK_CAP_ACK, 1)
    except OSError:
        connection.close()
        raise
    return connection


def first_line(text: str | None) -> str:
    """The first line of nft's complaint that says something."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "no reason given")


def _failure(error: OSError) -> SyncFailed:
    kind = TrustLost if error.errno in _STALE else SyncFailed
    return kind(f"nf_tables: {error.strerror}")
