"""Virtual servers over generic netlink (net/netfilter/ipvs/ip_vs_ctl.c), and their graceful removal."""

import errno
import logging
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Self

from kproxy_core.contract import Destination, Family, HostError, format_socket
from kproxy_core.linux.errors import doing
from kproxy_core.netlink.messages import NETLINK_GENERIC, NetlinkRequest, attributes, decoding, text_attribute
from kproxy_core.netlink.sockets import NetlinkSocket, RequestError
from kproxy_ipvs import batch as messages
from kproxy_ipvs.applied import HeldServer
from kproxy_ipvs.batch import (
    GENERIC,
    DeleteDestination,
    DeleteServer,
    Operation,
    PutDestination,
    PutServer,
    RealServer,
)
from kproxy_ipvs.kernel import connections
from kproxy_ipvs.wanted import Scheduling, ServerKey

log = logging.getLogger("kproxy.ipvs")

_PERIOD = 10.0
"""Interval in seconds between checks while real servers are draining."""

_CONTROLLER = 0x10
_GET_FAMILY = 3
_FAMILY_ID, _FAMILY_NAME = 1, 2
"""Of linux/genetlink.h."""

_SERVICE, _DESTINATION = 1, 2
"""IPVS_CMD_ATTR_SERVICE and IPVS_CMD_ATTR_DEST of linux/ip_vs.h."""

_TRIAL_MARK = 0xFFFFFFFF
"""Mark of the virtual server of a trial; `names.mark` never returns it."""

_ABSENT = frozenset({errno.ESRCH, errno.ENOENT})
_NO_UNICAST = frozenset({errno.EINVAL, errno.EAFNOSUPPORT})
"""The kernel's errors for a real server whose address is not that of a single host."""

RealServers = AbstractSet[tuple[ServerKey, Destination]]
"""Real servers, each with its virtual server."""


class Draining:
    """Removes real servers gracefully: weight 0 until their connections have ended, then deletion by a
    thread.

    As kube-proxy 1.36 (pkg/proxy/ipvs/graceful_termination.go). After a restart, draining real servers are
    found in the kernel.
    """

    def __init__(self, delete_drained: Callable[[RealServers], RealServers]) -> None:
        """*delete_drained* deletes real servers without connections and returns the others.

        It may raise HostError.
        """
        self._delete_drained = delete_drained
        self.lock = threading.RLock()
        """To be held for changes of real servers, so that none is deleted that was just added again, and for
        all methods but `close`."""
        self._servers: set[tuple[ServerKey, Destination]] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, servers: RealServers) -> None:
        """Delete the *servers* without connections, and the others later. Their weight is 0 already.

        Raises HostError.
        """
        self._servers |= self._delete_drained(servers)
        if self._servers and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ipvs-draining", daemon=True)
            self._thread.start()

    def forget(self, key: ServerKey, where: Destination) -> bool:
        """Stop draining a real server. Return False if it was not draining."""
        was_draining = (key, where) in self._servers
        self._servers.discard((key, where))
        return was_draining

    def forget_all_of(self, keys: Collection[ServerKey]) -> None:
        """Forget the real servers of deleted virtual servers."""
        self._servers = {server for server in self._servers if server[0] not in keys}

    def clear(self) -> None:
        self._servers.clear()

    def close(self) -> None:
        """Stop the thread. Draining real servers keep weight 0."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD):
            with self.lock:
                if not self._servers:
                    continue
                try:
                    self._servers = set(self._delete_drained(self._servers))
                except HostError as error:
                    log.debug("could not delete drained real servers: %s", error)


class VirtualServers:
    """Reads and writes virtual servers. Thread-safe."""

    def __init__(self) -> None:
        """Raises HostError if the kernel has no IPVS."""
        self._lock = threading.RLock()
        try:
            with NetlinkSocket.open(NETLINK_GENERIC) as sock:
                self._family = _read_family_number(sock)
            self._socket = NetlinkSocket.open(NETLINK_GENERIC)
        except OSError as error:
            raise HostError("IPVS does not answer, is ip_vs loaded?", error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def read(self, family: Family) -> dict[ServerKey, HeldServer]:
        """Return all virtual servers of *family*. Raises HostError."""
        return {
            key: HeldServer(scheduling, {item.where: item.weight for item in items})
            for key, (scheduling, items) in self.count(family).items()
        }

    def count(self, family: Family) -> dict[ServerKey, tuple[Scheduling, list[RealServer]]]:
        """Return all virtual servers of *family*, with connection counts. Raises HostError."""
        with self._lock:
            listed = connections.read_real_servers()
            return {
                key: (scheduling, listed[key] if key in listed else self.destinations(key))
                for key, scheduling in self.schedulings(family).items()
            }

    def schedulings(self, family: Family) -> dict[ServerKey, Scheduling]:
        """Return all virtual servers of *family*, without their real servers. Raises HostError."""
        with self._lock:
            with doing("read from IPVS"):
                found = [*map(messages.decode_server, self._dump(messages.dump_servers(), _SERVICE))]
            return {key: scheduling for key, scheduling in filter(None, found) if key.family is family}

    def destinations(self, key: ServerKey) -> list[RealServer]:
        """Return the real servers of *key*; none if it does not exist. Raises HostError."""
        with self._lock:
            answers = self._dump(messages.dump_destinations(key), _DESTINATION)
            with doing("read from IPVS"):
                return [messages.decode_destination(key.family, answer) for answer in answers]

    def write(self, operations: Sequence[Operation]) -> list[PutDestination]:
        """Execute *operations* in order. Return the real servers with unusable addresses.

        Deletions of missing objects succeed. Raises HostError for the first other refusal, after executing
        all operations.
        """
        unusable: list[PutDestination] = []
        for refusal in self._exchange([messages.encode(operation) for operation in operations]):
            operation = operations[refusal.number]
            if _is_removal(operation) and refusal.code in _ABSENT:
                continue
            if not isinstance(operation, PutDestination) or refusal.code not in _NO_UNICAST:
                raise HostError(_describe(operation), refusal.error)
            unusable.append(operation)
        return unusable

    def delete_drained(self, draining: RealServers) -> RealServers:
        """Delete those of the *draining* real servers that have no connections; return the others.

        Raises HostError.
        """
        drained: list[Operation] = []
        left: set[tuple[ServerKey, Destination]] = set()
        with self._lock:
            for key in {key for key, _ in draining}:
                for item in self.destinations(key):
                    if (key, item.where) not in draining or item.weight:
                        continue
                    if item.connections:
                        left.add((key, item.where))
                    else:
                        drained.append(DeleteDestination(key, item.where))
            self.write(drained)
        return left

    def set_timeouts(self, tcp: int, tcp_fin: int, udp: int) -> None:
        """Set the timeouts of connections in seconds; 0 keeps the kernel's value. Raises HostError."""
        for refusal in self._exchange([messages.set_timeouts(tcp, tcp_fin, udp)]):
            raise HostError("cannot set IPVS timeouts", refusal.error)

    def _exchange(self, payloads: Sequence[bytes]) -> list[RequestError]:
        """Send *payloads* and return the refusals, by index. Raises HostError."""
        with doing("write to IPVS"), self._lock:
            return self._socket.exchange([NetlinkRequest(self._family, 0, payload) for payload in payloads])

    def _dump(self, payload: bytes, kind: int) -> list[dict[int, bytes]]:
        """Return the attributes nested in attribute *kind* of each answer; [] for a missing object."""
        try:
            return self._socket.dump(self._family, payload, lambda answers: [
                attributes(found[kind])
                for data, start, end in answers
                if kind in (found := attributes(data, start + GENERIC.size, end))
            ])  # fmt: skip
        except OSError as error:
            if error.errno in _ABSENT:
                return []
            raise HostError("cannot read from IPVS", error) from error


def try_server(scheduler: str, family: Family) -> None:
    """Create a virtual server of *family* that no packet reaches, and delete it. Raises HostError."""
    key = ServerKey.marked(family, _TRIAL_MARK)
    create = PutServer(key, Scheduling(scheduler), new=True)
    with VirtualServers() as servers:
        servers.write([DeleteServer(key), create, DeleteServer(key)])


def _read_family_number(sock: NetlinkSocket) -> int:
    """Return the number of the generic netlink family IPVS. Raises OSError."""
    payload = GENERIC.pack(_GET_FAMILY, 1, 0) + text_attribute(_FAMILY_NAME, "IPVS")
    data, start, end = sock.request_one(_CONTROLLER, payload)
    with decoding("a family of generic netlink"):
        return int.from_bytes(attributes(data, start + GENERIC.size, end)[_FAMILY_ID], sys.byteorder)


def _is_removal(operation: Operation) -> bool:
    drains = isinstance(operation, PutDestination) and not operation.weight
    return drains or isinstance(operation, DeleteServer | DeleteDestination)


def _describe(operation: Operation) -> str:
    text = f"virtual server {operation.key}"
    if isinstance(operation, PutDestination | DeleteDestination):
        text += f", real server {format_socket(*operation.where)}"
    return text
