"""Clients on their way to relays without portals.

Conntrack directs a client's packets to the destination of its first one. A SYN that is repeated a minute
later still reaches the relay, which must listen then, or the client is refused.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.conntrack.flows import delete_stale_udp
from kproxy_core.host.errors import doing
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.addresses import node_addresses
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_userspace.applied import LocalPort, RelayedFlows
from kproxy_userspace.wanted import Redirect

_OPENING: Final = frozenset({0, 1, 2, 8, 9})
"""States in which a SYN or ACK may arrive: NONE, SYN_SENT, SYN_RECV, SYN_SENT2, CLOSE (nf_conntrack_tcp.h).

After a reset, conntrack takes a SYN from the same port for the same connection; after FIN it does not.
"""

_HALF_OPEN: Final = "03"
"""TCP_SYN_RECV in /proc/net/tcp: the last ACK was lost after conntrack had seen it."""
_SOCKETS: Final = {Family.IPV4: "/proc/thread-self/net/tcp", Family.IPV6: "/proc/thread-self/net/tcp6"}


def arriving(family: Family, ports: Collection[LocalPort]) -> Counter[LocalPort]:
    """Return the number of clients that may still reach *ports* of relays without portals.

    For TCP these are unfinished handshakes in conntrack or in the kernel's sockets. Handshakes with SYN
    cookies have no socket. For UDP they are flows. Raises HostError.
    """
    if not ports:
        return Counter()
    with doing(f"read the connections to {family.label} relays"):
        # Conntrack first: a handshake that has ended there may still be half-open in a socket.
        return Counter(_tracked(family, ports)) + Counter(_half_open(family, ports))


def delete_flows(family: Family, of: Iterable[Redirect]) -> None:
    """Let the UDP clients of these portals start new flows. Raises HostError."""
    delete_stale_udp(family, RelayedFlows.of(of))


def _tracked(family: Family, ports: Collection[LocalPort]) -> list[LocalPort]:
    wanted = {port.number.to_bytes(2, "big") for port in ports}
    local = node_addresses()
    with ctnetlink.open_socket() as sock:
        found = ctnetlink.flows(sock, family, lambda flows: list(_relayed(flows, wanted, local, family)))
    return [port for port in found if port in ports]


def _relayed(
    flows: Iterable[ctnetlink.TrackedFlow], wanted: Collection[bytes], local: Collection[Address],
    family: Family,
) -> Iterator[LocalPort]:  # fmt: skip
    """Yield the relay port of each flow that is answered by one of the *wanted* ports of this node."""
    for flow in flows:
        by = ctnetlink.answered_by(family, flow)
        same = (by.address, by.port) == (flow.destination, flow.port)
        if by.port not in wanted or same or by.address not in local:
            continue
        protocol = flow.protocol
        if protocol == Protocol.UDP or (protocol == Protocol.TCP and _state(flow) in _OPENING):
            yield LocalPort(Protocol(protocol), int.from_bytes(by.port, "big"))


def _state(flow: ctnetlink.TrackedFlow) -> int:
    found = netlink.attributes(flow.data, flow.start, flow.end)
    return ctnetlink.tcp_state(found.get(ctnetlink.PROTOINFO, b""))


def _half_open(family: Family, ports: Collection[LocalPort]) -> Iterator[LocalPort]:
    path = _SOCKETS[family]
    if not os.path.exists(path):
        return  # A kernel without IPv6.
    with open(path, encoding="ascii") as lines:
        for line in lines:
            words = line.split(maxsplit=4)
            if words[3] == _HALF_OPEN:
                port = LocalPort(Protocol.TCP, int(words[1].rpartition(":")[2], 16))
                if port in ports:
                    yield port
