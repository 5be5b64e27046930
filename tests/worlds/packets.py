"""First packets of connections, opened by sockets of every host, and what becomes of each on the node."""

import contextlib
import errno
import itertools
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kproxy_conformance.network.addresses import resolve
from kproxy_conformance.network.topology import Topology
from kproxy_core.model.address import Address, format_address
from kproxy_core.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    NLM_F_ACK,
    attribute,
    attributes,
    messages,
    text,
)
from kproxy_core.netlink.sockets import NetlinkSocket

_GROUP, _LAST_PORT = 5, 65000
_JUDGE: Final = f"""
table inet judge {{
    chain first {{ type filter hook prerouting priority -2000000000;
        udp dport {_LAST_PORT} log prefix "S" group {_GROUP} drop; }}
    chain sent {{ type filter hook output priority -2000000000;
        tcp flags & rst == rst log prefix "R" group {_GROUP}
        icmp type destination-unreachable log prefix "R" group {_GROUP}
        icmpv6 type destination-unreachable log prefix "R" group {_GROUP}
        udp dport {_LAST_PORT} log prefix "S" group {_GROUP} drop; }}
    chain received {{ type filter hook input priority 2000000000;
        ct state new,untracked log prefix "I" group {_GROUP}; }}
    chain leaving {{ type filter hook postrouting priority 2000000000;
        oifname != "lo" ct state new,untracked log prefix "P" group {_GROUP}; }}
}}
"""
_LOG, _CONFIG = 4 << 8, 4 << 8 | 1
_PREFIX, _PAYLOAD = 10, 9
"""Attributes of a logged packet (NFULA_*)."""
_FREEBIND = {socket.AF_INET: (socket.IPPROTO_IP, 15), socket.AF_INET6: (socket.IPPROTO_IPV6, 78)}
_HOPS = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TTL),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS)}
_ERRORS = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
_FIRST_HOPS: Final = 71
MOST: Final = (255 - _FIRST_HOPS) // 2
"""Packets at a time. Their hop limits tell them apart, of which the node may take one."""

DELIVERED, SENT, REFUSED, NOTHING = "delivered", "sent", "refused", "nothing"


class Attempted(NamedTuple):
    """A connection to open: from which host and address, to where."""

    host: str
    source: str
    destination: str
    port: int
    protocol: str


class Seen(NamedTuple):
    """What became of the first packet."""

    kind: str
    """``delivered`` to the node, ``sent`` on, ``refused`` by the node; else ``nothing``."""
    source: str = ""
    destination: str = ""
    port: int = 0

    def __str__(self) -> str:
        return self.kind if not self.destination else (
            f"{self.kind} from {self.source} to {self.destination} port {self.port}")


class PacketJudge:
    """Sees what leaves the node's rules."""

    def __init__(self, topology: Topology, family: str) -> None:
        self._topology = topology
        self._node = topology["node"]
        self._family = family
        self._source_ports = itertools.count(10_000)
        _know_neighbours(topology)
        self._node.run("nft", "-f", "-", stdin=_JUDGE)
        with self._node.entered():
            self._log = NetlinkSocket.open(NETLINK_NETFILTER)
        for kind, value in (
            (1, b"\1"), (2, struct.pack("!IBx", 256, 2)), (5, struct.pack("!I", 1))):
            self._log.request(
                _CONFIG, NLM_F_ACK, NFGENMSG.pack(0, 0, socket.htons(_GROUP)) + attribute(kind, value))

    def close(self) -> None:
        self._log.close()

    def judged(self, attempts: Sequence[Attempted]) -> list[Seen]:
        """Open the connections of *attempts* one after the other; return what became of each first packet.

        Packets pass virtual devices on the processor that sends them, in their order.
        """
        processors = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(processors)})
        try:
            with contextlib.ExitStack() as stack:
                sent = [stack.enter_context(contextlib.closing(self._open(each, number)))
                        for number, each in enumerate(attempts)]
                ports = {sock.getsockname()[1]: number for number, sock in enumerate(sent)}
                for host in ("client", "node"):
                    self._send_last(host)
                seen = self._read(ports, len(attempts))
                return [Seen(REFUSED) if each.kind == NOTHING and _is_refused(sock) else each
                        for each, sock in zip(seen, sent, strict=True)]
        finally:
            os.sched_setaffinity(0, processors)

    def _open(self, attempt: Attempted, number: int) -> socket.socket:
        family = socket.AF_INET if self._family == "ipv4" else socket.AF_INET6
        is_stream = attempt.protocol == "TCP"
        sock = self._topology[attempt.host].socket(
            family, socket.SOCK_STREAM if is_stream else socket.SOCK_DGRAM)
        sock.setblocking(False)
        if attempt.host == "client":  # Which sends from addresses of a crowd, too.
            sock.setsockopt(*_FREEBIND[family], 1)
        sock.setsockopt(*_ERRORS[family], 1)
        sock.setsockopt(*_HOPS[family], _FIRST_HOPS + 2 * number)
        port = 10_000 + next(self._source_ports) % 20_000
        sock.bind((attempt.source, port))
        with contextlib.suppress(OSError):  # Such as EPERM, where rules drop it.
            if is_stream:
                sock.connect_ex((attempt.destination, attempt.port))
            else:
                sock.sendto(b"x", (attempt.destination, attempt.port))
        return sock

    def _send_last(self, host: str) -> None:
        """Send the packet behind which all others have been seen."""
        family = socket.AF_INET if self._family == "ipv4" else socket.AF_INET6
        with self._topology[host].socket(family, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.sendto(b"x", (resolve("node", self._family), _LAST_PORT))

    def _read(self, ports: dict[int, int], count: int) -> list[Seen]:
        found: dict[int, Seen] = {}
        ends = 0
        while ends < 2:
            received = self._log.receive()
            for kind, _, _, start, end in messages(received):
                if kind != _LOG:
                    continue
                logged = attributes(received, start + NFGENMSG.size, end)
                where = text(logged.get(_PREFIX, b""))
                if where == "S":
                    ends += 1
                    continue
                packet = _parse(logged[_PAYLOAD])
                if packet is None:
                    continue
                source, _, destination, port, hops = packet
                if where == "R":
                    number = ports.get(port)
                    if number is not None:
                        found.setdefault(number, Seen(REFUSED))
                    continue
                number = (hops + 1 - _FIRST_HOPS) // 2
                if number in range(count) and found.get(number, Seen(REFUSED)).kind == REFUSED:
                    found[number] = Seen(DELIVERED if where == "I" else SENT, source, destination, port)
        return [found.get(number, Seen(NOTHING)) for number in range(count)]


_LINKS: Final = (
    *((one, "eth0", other, "eth0") for one in ("node", "node2", "client")
      for other in ("node", "node2", "client") if one != other),
    ("node", "eth1", "client", "eth1"), ("client", "eth1", "node", "eth1"),
    ("pod1", "eth0", "node", "kcbr0"), ("node", "kcbr0", "pod1", "eth0"),
    ("pod2", "eth0", "node", "kcveth2"), ("node", "kcveth2", "pod2", "eth0"))
"""Hosts and their devices, each with one whose addresses it sends to."""


def _know_neighbours(topology: Topology) -> None:
    """Have hosts know the link-layer addresses of others: rules stop neighbour discovery, too."""
    for host, device, other, of in _LINKS:
        (link,) = json.loads(topology[other].run("ip", "-j", "address", "show", "dev", of))
        for each in link["addr_info"]:
            topology[host].run("ip", "neighbour", "replace", each["local"], "lladdr", link["address"],
                               "dev", device, "nud", "permanent")


def _is_refused(sock: socket.socket) -> bool:
    """Return whether the sender was told. An answer to a bridged packet meets no hook of the node."""
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ECONNREFUSED, errno.EHOSTUNREACH):
        return True
    try:
        sock.recvmsg(512, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return False
    return True


def _parse(data: bytes) -> tuple[str, int, str, int, int] | None:
    """Return source, destination and hop limit; of an ICMP error, those of what it answers, reversed."""
    is_ipv4 = data[0] >> 4 == 4
    at, size, protocol, behind = (12, 4, data[9], (data[0] & 15) * 4) if is_ipv4 else (8, 16, data[6], 40)
    source, destination = data[at : at + size], data[at + size : at + 2 * size]
    body = data[behind:]
    if protocol in (1, 58):
        inner = _parse(body[8:])
        return inner and (*inner[2:4], *inner[:2], inner[4])
    if protocol not in (6, 17):
        return None
    source_port, port = struct.unpack_from("!HH", body)
    return (format_address(Address(source)), source_port, format_address(Address(destination)), port,
            data[8 if is_ipv4 else 7])
