"""The kernel's virtual servers of one IP family, through generic netlink."""

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.model.address import Family, format_socket
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.applied import HeldServer
from kproxy_ipvs.batch import servers as messages
from kproxy_ipvs.batch.servers import (
    Body,
    DeleteDestination,
    DeleteServer,
    Listed,
    Operation,
    PutDestination,
    PutServer,
)
from kproxy_ipvs.kernel import listing
from kproxy_ipvs.kernel.draining import RealServers
from kproxy_ipvs.kernel.exchange import Request, exchange
from kproxy_ipvs.wanted import Scheduling, ServerKey

NETLINK_GENERIC = 16
_CONTROL = 0x10
_GET_FAMILY = 3

_CHECK_MARK = 0xFFFFFFFF
"""Of a virtual server that lasts for a moment; none of ours has it."""

_GONE = frozenset({errno.ESRCH, errno.ENOENT})
_NEVER = frozenset({errno.EINVAL, errno.EAFNOSUPPORT})
"""What the kernel says to a real server at an address that is none of a single host (ip_vs_ctl.c)."""


class VirtualServers:
    """Reads and writes. Also used by the thread that waits for connections to end; calls take turns."""

    def __init__(self) -> None:
        """Raises HostError if the kernel has no IPVS."""
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        try:
            self._socket = netlink.open_socket(NETLINK_GENERIC)
            self._family = _family_number(self._socket)
        except OSError as error:
            self.close()
            raise HostError(f"IPVS does not answer, is ip_vs loaded? {error.strerror}") from error

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def read(self, family: Family) -> dict[ServerKey, HeldServer]:
        """All virtual servers of *family*. Raises HostError."""
        return {
            key: HeldServer(scheduling, {item.where: item.weight for item in items})
            for key, (scheduling, items) in self.count(family).items()
        }

    def count(self, family: Family) -> dict[ServerKey, tuple[Scheduling, list[Listed]]]:
        """All virtual servers of *family*, and their real servers with connections. Raises HostError."""
        with self._lock:
            listed = _listed()
            decoded = map(messages.decode_server, self._dump(messages.dump_servers(), 1))
            found = [server for server in decoded if server is not None and server[0].family is family]
            return {
                key: (scheduling, listed[key] if key in listed else self.destinations(key))
                for key, scheduling in found
            }

    def destinations(self, key: ServerKey) -> list[Listed]:
        """The real servers of *key*; none if it is gone. Raises HostError."""
        with self._lock:
            answers = self._dump(messages.dump_destinations(key), 2)
            return [messages.decode_destination(key.family, attributes) for attributes in answers]

    def write(self, operations: Sequence[Operation]) -> None:
        """Do all *operations* in order. What is to be deleted may be gone.

        Raises HostError about the first that is refused; all others are done.
        """
        for operation, error in self._refused(operations):
            raise HostError(f"{_told(operation)}: {error.strerror}") from error

    def write_usable(self, operations: Sequence[Operation]) -> list[PutDestination]:
        """The same, but returns the real servers that can't be; the rest does not suffer from them."""
        unusable: list[PutDestination] = []
        for operation, error in self._refused(operations):
            if not isinstance(operation, PutDestination) or error.errno not in _NEVER:
                raise HostError(f"{_told(operation)}: {error.strerror}") from error
            unusable.append(operation)
        return unusable

    def _refused(self, operations: Sequence[Operation]) -> list[tuple[Operation, OSError]]:
        """Do all *operations* in order; returns what was refused and not gone already."""
        with self._lock:
            refused = self._exchange([messages.encode(operation) for operation in operations])
            found = [(operations[at], error) for at, error in refused]
        return [(one, error) for one, error in found if not (_takes_away(one) and error.errno in _GONE)]

    def delete_drained(self, leaving: RealServers) -> RealServers:
        """Delete those real servers that have no connections any more; returns the others.

        Raises HostError.
        """
        drained: list[Operation] = []
        left: dict[ServerKey, set[Destination]] = {}
        with self._lock:
            for key, places in leaving.items():
                for item in self.destinations(key):
                    if item.where not in places or item.weight:
                        continue
                    if item.connections:
                        left.setdefault(key, set()).add(item.where)
                    else:
                        drained.append(DeleteDestination(key, item.where))
            self.write(drained)
        return left

    def set_timeouts(self, tcp: int, tcp_fin: int, udp: int) -> None:
        """See `messages.set_timeouts`. Raises HostError."""
        with self._lock:
            self._exchange([messages.set_timeouts(tcp, tcp_fin, udp)])

    def _exchange(self, bodies: Sequence[Body]) -> list[tuple[int, OSError]]:
        """Send *bodies*; returns what was refused: index and reason."""
        if not bodies:
            return []
        requests = [Request(self._family, 0, body.payload) for body in bodies]
        try:
            refused = exchange(self._open(), requests)
        except OSError as error:
            raise HostError(f"IPVS: {error.strerror}") from error
        return [(at, OSError(code, os.strerror(code))) for at, code in refused]

    def _dump(self, body: Body, attribute: int) -> list[dict[int, bytes]]:
        """The attributes nested in *attribute* of every answer; none if what is asked about is gone."""
        request = netlink.message(self._family, netlink.NLM_F_DUMP, body.payload)

        def read() -> list[dict[int, bytes]]:
            return [
                netlink.attributes(found[attribute], 0, len(found[attribute]))
                for data, start, end in netlink.dump(self._open(), request)
                if attribute in (found := netlink.attributes(data, start + 4, end))
            ]

        try:
            return netlink.uninterrupted(read)
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise HostError(f"IPVS can't be read: {error.strerror}") from error

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise OSError(errno.EBADF, "closed")
        return self._socket


def _listed() -> dict[ServerKey, list[Listed]]:
    """The real servers of as many virtual servers as /proc tells of: one file instead of a dump for each."""
    try:
        with listing.SERVERS.open(encoding="ascii") as lines:
            return listing.real_servers(lines)
    except OSError:
        return {}


def refusal(scheduler: str, family: Family) -> str:
    """What the kernel has against virtual servers of *family* with *scheduler*; "" if nothing.

    Makes one that no packet gets to, and deletes it.
    """
    key = ServerKey(family, _CHECK_MARK, None, 0, 0)
    try:
        servers = VirtualServers()
    except HostError as error:
        return str(error)
    try:
        servers.write([DeleteServer(key), PutServer(key, Scheduling(scheduler), new=True), DeleteServer(key)])
    except HostError as error:
        return str(error)
    finally:
        servers.close()
    return ""


def _takes_away(operation: Operation) -> bool:
    leaving = isinstance(operation, PutDestination) and not operation.weight
    return leaving or isinstance(operation, DeleteServer | DeleteDestination)


def _told(operation: Operation) -> str:
    text = f"virtual server {operation.key}"
    if isinstance(operation, PutDestination | DeleteDestination):
        text += f", real server {format_socket(*operation.where)}"
    return text


def _family_number(sock: socket.socket) -> int:
    """The number of the generic netlink family IPVS. Raises OSError."""
    payload = struct.pack("=BBH", _GET_FAMILY, 1, 0) + netlink.attribute(2, b"IPVS\0")
    sock.send(netlink.message(_CONTROL, 0, payload))
    for found in _answers(sock.recv(netlink.RECEIVE_SIZE)):
        if 1 in found:
            return int(struct.unpack("=H", found[1])[0])
    raise OSError(errno.ENOENT, "no family IPVS")


def _answers(data: bytes) -> Iterator[dict[int, bytes]]:
    for kind, _, _, start, end in netlink.messages(data):
        if kind == netlink.NLMSG_ERROR:
            netlink.raise_for(netlink.error_code(data, start))
        else:
            yield netlink.attributes(data, start + 4, end)
