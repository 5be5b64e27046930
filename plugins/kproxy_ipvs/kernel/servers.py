"""Virtual servers over generic netlink (net/netfilter/ipvs/ip_vs_ctl.c), and their graceful removal."""

import errno
import logging
import sys
import threading
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Self

from kproxy_core.contract import Destination, Family, HostError, format_socket
from kproxy_core.linux.errors import doing
from kproxy_core.netlink.messages import NETLINK_GENERIC, NetlinkRequest, attributes, decoding, text_attribute
from kproxy_core.netlink.sockets import NetlinkSocket, RequestError
from kproxy_ipvs import batch
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
_DELETED_AT_ONCE, _BREAK = 100, 0.005
"""Number of real servers that the thread deletes at once, and seconds between, when a sync takes the lock."""

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

    def __init__(self, servers: "VirtualServers") -> None:
        self.lock = threading.RLock()
        """To be held for changes of real servers, so that none is deleted that was just added again, and for
        all methods but `close`."""
        self._kernel = servers
        self._servers: dict[tuple[ServerKey, Destination], int] = {}
        """With numbers that differ each time a real server begins to drain."""
        self._number = 0
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, servers: RealServers, later: Collection[ServerKey]) -> None:
        """Delete the *servers* without connections, and the others later. Their weight is 0 already.

        The thread begins with those of the virtual servers *later*, whose real servers the kernel takes long
        to list. Raises HostError.
        """
        for_thread = {server for server in servers if server[0] in later}
        self._number += 1
        self._servers |= dict.fromkeys(for_thread, self._number)
        if for_thread:
            self._wake.set()
        drained, left = find_drained(self._kernel, servers - for_thread)
        self._servers |= dict.fromkeys(left, self._number)
        if self._servers and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ipvs-draining", daemon=True)
            self._thread.start()
        self._kernel.write(drained)

    def forget(self, key: ServerKey, where: Destination) -> bool:
        """Stop draining a real server. Return False if it was not draining."""
        return self._servers.pop((key, where), None) is not None

    def forget_all_of(self, keys: Collection[ServerKey]) -> None:
        """Forget the real servers of deleted virtual servers."""
        if keys:
            self._servers = {server: at for server, at in self._servers.items() if server[0] not in keys}

    def clear(self) -> None:
        self._servers.clear()

    def close(self) -> None:
        """Stop the thread. Draining real servers keep weight 0."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(_PERIOD)
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                self._delete_drained()
            except HostError as error:
                log.debug("could not delete drained real servers: %s", error)

    def _delete_drained(self) -> None:
        """Delete the real servers without connections. Holds the lock for moments only. Raises HostError."""
        with self.lock:
            known = dict(self._servers)
        if not known:
            return
        with VirtualServers() as kernel:
            drained, left = find_drained(kernel, known.keys())
            gone = known.keys() - left - {(each.key, each.where) for each in drained}
            for at in range(0, len(drained), _DELETED_AT_ONCE):
                with self.lock:
                    ended = [
                        each for each in drained[at : at + _DELETED_AT_ONCE]
                        if self._servers.get(server := (each.key, each.where)) == known[server]
                    ]
                    for each in ended:
                        del self._servers[each.key, each.where]
                    kernel.write(ended)
                if self._closed.wait(_BREAK):
                    return
        with self.lock:
            for server in gone:
                if self._servers.get(server) == known[server]:
                    del self._servers[server]


def find_drained(
    kernel: "VirtualServers", draining: RealServers
) -> tuple[list[DeleteDestination], set[tuple[ServerKey, Destination]]]:
    """Return deletions of *draining* real servers without connections, and those that have some.

    Raises HostError.
    """
    drained: list[DeleteDestination] = []
    left: set[tuple[ServerKey, Destination]] = set()
    for key in {key for key, _ in draining}:
        for item in kernel.destinations(key):
            if (key, item.where) not in draining or item.weight:
                continue
            if item.connections:
                left.add((key, item.where))
            else:
                drained.append(DeleteDestination(key, item.where))
    return drained, left


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
                found = [*map(batch.decode_server, self._dump(batch.dump_servers(), _SERVICE))]
            return {key: scheduling for key, scheduling in filter(None, found) if key.family is family}

    def destinations(self, key: ServerKey) -> list[RealServer]:
        """Return the real servers of *key*; none if it does not exist. Raises HostError."""
        with self._lock:
            answers = self._dump(batch.dump_destinations(key), _DESTINATION)
            with doing("read from IPVS"):
                return [batch.decode_destination(key.family, answer) for answer in answers]

    def write(self, operations: Sequence[Operation]) -> list[PutDestination]:
        """Execute *operations* in order. Return the real servers with unusable addresses.

        Deletions of missing objects succeed. Raises HostError for the first other refusal, after executing
        all operations.
        """
        unusable: list[PutDestination] = []
        for refusal in self._exchange([batch.encode(operation) for operation in operations]):
            operation = operations[refusal.number]
            if _is_removal(operation) and refusal.code in _ABSENT:
                continue
            if not isinstance(operation, PutDestination) or refusal.code not in _NO_UNICAST:
                raise HostError(_describe(operation), refusal.error)
            unusable.append(operation)
        return unusable

    def set_timeouts(self, tcp: int, tcp_fin: int, udp: int) -> None:
        """Set the timeouts of connections in seconds; 0 keeps the kernel's value. Raises HostError."""
        for refusal in self._exchange([batch.set_timeouts(tcp, tcp_fin, udp)]):
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
