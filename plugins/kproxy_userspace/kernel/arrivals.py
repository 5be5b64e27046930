"""Clients that are still connecting to relays without portals.

Conntrack sends a client's packets to the destination of its first one. A SYN that is retransmitted a minute
later still reaches the relay, which must listen then, or the client is refused.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from kproxy_core.contract import Family, Frontend, Protocol
from kproxy_core.linux import conntrack
from kproxy_core.linux.addresses import node_addresses
from kproxy_core.linux.errors import doing
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
    """A UDP flow to a relay, without an answer yet."""

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

    def opening(listed: Iterable[conntrack.TrackedFlow]) -> Counter[LocalPort]:
        return Counter(port for flow, port in _relayed(family, ports, listed) if _is_opening(flow))

    with doing(f"read the connections to {family.label} relays"):
        # Conntrack first: a handshake that has ended there may still be half-open in a socket.
        return conntrack.dump_flows(family, opening) + Counter(_half_open(family, ports))


def delete_flows(family: Family, of: Iterable[Redirect]) -> None:
    """Let the UDP clients of these portals start new flows. Raises HostError."""
    relayed = RelayedFlows.of(of, node_addresses())
    conntrack.delete_stale_udp(family, relayed.ports, relayed.is_stale)


def unanswered_flows(family: Family, ports: Collection[int]) -> dict[bytes, UnansweredFlow]:
    """Return the UDP flows to these *ports* of relays without an answer yet, by id. Raises HostError.

    The kernel forgets such a flow 30 seconds after its last datagram.
    """
    if not ports:
        return {}

    def unanswered(listed: Iterable[conntrack.TrackedFlow]) -> dict[bytes, UnansweredFlow]:
        found = {}
        for flow, port in _relayed(family, [LocalPort(Protocol.UDP, port) for port in ports], listed):
            progress = conntrack.progress_of(flow)
            if not progress.is_answered:
                frontend = Frontend(flow.destination, port.protocol, int.from_bytes(flow.port, "big"))
                found[progress.id] = UnansweredFlow(frontend, port.number)
        return found

    with doing(f"list unanswered {family.label} UDP flows"):
        return conntrack.dump_flows(family, unanswered, conntrack.UNREPLIED)


def _is_opening(flow: conntrack.TrackedFlow) -> bool:
    """Return whether the client may still reach the relay; true for UDP."""
    return flow.protocol == Protocol.UDP or conntrack.progress_of(flow).tcp_state in _OPENING


def _relayed(
    family: Family, ports: Iterable[LocalPort], listed: Iterable[conntrack.TrackedFlow]
) -> Iterator[tuple[conntrack.TrackedFlow, LocalPort]]:
    """Yield the flows that portals redirected to local *ports*, each with its port. Raises HostError."""
    relays: dict[tuple[int, bytes], LocalPort] = {
        (port.protocol, port.number.to_bytes(2, "big")): port for port in ports}
    local = node_addresses()
    for flow in listed:
        by = conntrack.answered_by(family, flow)
        port = relays.get((flow.protocol, by.port))
        is_same = (by.address, by.port) == (flow.destination, flow.port)
        if port is not None and not is_same and by.address in local:
            yield flow, port


def _half_open(family: Family, ports: Collection[LocalPort]) -> Iterator[LocalPort]:
    if not any(port.protocol is Protocol.TCP for port in ports):
        return
    # A kernel without IPv6 has no such file.
    with suppress(FileNotFoundError), open(_SOCKETS[family], encoding="ascii") as lines:
        for line in lines:
            words = line.split(maxsplit=4)
            if words[3] == _HALF_OPEN:
                port = LocalPort(Protocol.TCP, int(words[1].rpartition(":")[2], 16))
                if port in ports:
                    yield port
