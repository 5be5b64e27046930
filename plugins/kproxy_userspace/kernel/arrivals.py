"""Clients on their way to relays without portals.

Conntrack directs a client's packets to the destination of its first one. A SYN that is repeated a minute
later still reaches the relay, which must listen then, or the client is refused.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.conntrack.flows import delete_stale_udp
from kproxy_core.host.errors import doing
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.addresses import node_addresses
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.plan.service_plan import Frontend
from kproxy_userspace.applied import LocalPort, RelayedFlows
from kproxy_userspace.wanted import Redirect

_OPENING: Final = frozenset({0, 1, 2, 8, 9})
"""States in which a SYN or ACK may arrive: NONE, SYN_SENT, SYN_RECV, SYN_SENT2, CLOSE (nf_conntrack_tcp.h).

After a reset, conntrack takes a SYN from the same port for the same connection; after FIN it does not.
"""

_HALF_OPEN: Final = "03"
"""TCP_SYN_RECV in /proc/net/tcp: the last ACK was lost after conntrack had seen it."""
_SOCKETS: Final = {Family.IPV4: "/proc/thread-self/net/tcp", Family.IPV6: "/proc/thread-self/net/tcp6"}


class UnansweredFlow(NamedTuple):
    """A UDP flow to a relay that has had no answer."""

    frontend: Frontend
    """The address and port that the client dialled."""
    relay: int
    """The relay's port."""


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
    delete_stale_udp(family, RelayedFlows.of(of, node_addresses()))


def unanswered_flows(family: Family, ports: Collection[int]) -> dict[bytes, UnansweredFlow]:
    """Return the UDP flows to these *ports* of relays that have had no answer, by id. Raises HostError.

    The kernel forgets such a flow 30 seconds after its last datagram.
    """
    if not ports:
        return {}
    wanted = {port.to_bytes(2, "big") for port in ports}
    local = node_addresses()
    with doing(f"list unanswered {family.label} UDP flows"), ctnetlink.open_socket() as sock:
        return ctnetlink.flows(
            sock, family, lambda flows: dict(_unanswered(flows, wanted, local, family)), ctnetlink.UNREPLIED)


def _unanswered(
    flows: Iterable[ctnetlink.TrackedFlow], wanted: Collection[bytes], local: Collection[Address],
    family: Family,
) -> Iterator[tuple[bytes, UnansweredFlow]]:  # fmt: skip
    for flow in flows:
        relay = _relay_port(flow, wanted, local, family) if flow.protocol == Protocol.UDP else None
        if relay is None:
            continue
        found = netlink.attributes(flow.data, flow.start, flow.end)
        if not int.from_bytes(found[ctnetlink.STATUS], "big") & ctnetlink.SEEN_REPLY:
            frontend = Frontend(flow.destination, Protocol.UDP, int.from_bytes(flow.port, "big"))
            yield found[ctnetlink.ID], UnansweredFlow(frontend, relay)


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
        port, protocol = _relay_port(flow, wanted, local, family), flow.protocol
        if port is None:
            continue
        if protocol == Protocol.UDP or (protocol == Protocol.TCP and _state(flow) in _OPENING):
            yield LocalPort(Protocol(protocol), port)


def _relay_port(
    flow: ctnetlink.TrackedFlow, wanted: Collection[bytes], local: Collection[Address], family: Family
) -> int | None:
    """Return the port, among the *wanted* ones of this node, to which a portal has led *flow*; None: none."""
    by = ctnetlink.answered_by(family, flow)
    same = (by.address, by.port) == (flow.destination, flow.port)
    return int.from_bytes(by.port, "big") if by.port in wanted and not same and by.address in local else None


def _state(flow: ctnetlink.TrackedFlow) -> int:
    found = netlink.attributes(flow.data, flow.start, flow.end)
    return ctnetlink.tcp_state(found.get(ctnetlink.PROTOINFO, b""))


def _half_open(family: Family, ports: Collection[LocalPort]) -> Iterator[LocalPort]:
    path = _SOCKETS[family]
    if not any(port.protocol is Protocol.TCP for port in ports) or not os.path.exists(path):
        return  # The latter: a kernel without IPv6.
    with open(path, encoding="ascii") as lines:
        for line in lines:
            words = line.split(maxsplit=4)
            if words[3] == _HALF_OPEN:
                port = LocalPort(Protocol.TCP, int(words[1].rpartition(":")[2], 16))
                if port in ports:
                    yield port
