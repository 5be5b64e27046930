"""Who is still on the way to a relay that no portal leads to any more.

Connection tracking leads a client's packets to where its first one went. A SYN that is sent again after a
minute gets there, and must find the relay listening, or the client is refused.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.addresses import node_addresses
from kproxy_core.model.address import Address, Family, Protocol

# linux/netfilter/nfnetlink_conntrack.h
_PROTOINFO_TCP: Final = 1
_STATE: Final = 1

_OPENING: Final = frozenset({0, 1, 2, 8, 9})
"""States in which a handshake may go on at the relay (nf_conntrack_tcp.h): NONE, SYN_SENT, SYN_RECV and
SYN_SENT2; and CLOSE: whom a relay has reset may come again from the same port, which is no new connection to
connection tracking. After any other end a SYN is."""

_HALF_OPEN: Final = "03"
"""TCP_SYN_RECV in /proc/net/tcp: connection tracking has seen an ACK that did not get further."""
_SOCKETS: Final = {Family.IPV4: "/proc/thread-self/net/tcp", Family.IPV6: "/proc/thread-self/net/tcp6"}


class Port(NamedTuple):
    """A relay's."""

    protocol: Protocol
    number: int


def arriving(family: Family, ports: Collection[Port]) -> Counter[Port]:
    """How many clients may still reach which of *ports* at this node, though no rule leads there.

    TCP: those whose handshake has not ended, as far as connection tracking and the kernel's sockets know.
    With SYN cookies, which have no socket, connection tracking alone knows. UDP: those that have a flow.
    Raises HostError.
    """
    if not ports:
        return Counter()
    try:
        # In this order: a handshake that connection tracking sees ended may be a half open socket, and
        # none begins.
        return Counter(_tracked(family, ports)) + Counter(_half_open(family, ports))
    except OSError as error:
        raise HostError(f"can't see who is on the way to {family.label} relays", error) from error


def _tracked(family: Family, ports: Collection[Port]) -> list[Port]:
    wanted = {port.number.to_bytes(2, "big") for port in ports}
    local = node_addresses()
    with ctnetlink.open_socket() as sock:
        found = ctnetlink.flows(sock, family, lambda flows: list(_relayed(flows, wanted, local, family)))
    return [port for port in found if port in ports]


def _relayed(
    flows: Iterable[ctnetlink.TrackedFlow], wanted: Collection[bytes], local: Collection[Address],
    family: Family,
) -> Iterator[Port]:  # fmt: skip
    """Where translated flows lead that are answered by one of the *wanted* ports here."""
    for flow in flows:
        by = ctnetlink.answered_by(family, flow)
        same = (by.address, by.port) == (flow.destination, flow.port)
        if by.port not in wanted or same or by.address not in local:
            continue
        protocol = flow.protocol
        if protocol == Protocol.UDP or (protocol == Protocol.TCP and _state(flow) in _OPENING):
            yield Port(Protocol(protocol), int.from_bytes(by.port, "big"))


def _state(flow: ctnetlink.TrackedFlow) -> int:
    data, start, end = flow.data, flow.start, flow.end
    for kind in (ctnetlink.PROTOINFO, _PROTOINFO_TCP):
        data = netlink.attributes(data, start, end).get(kind, b"")
        start, end = 0, len(data)
    return netlink.attributes(data, start, end).get(_STATE, b"\0")[0]


def _half_open(family: Family, ports: Collection[Port]) -> Iterator[Port]:
    path = _SOCKETS[family]
    if not os.path.exists(path):
        return  # A kernel without IPv6.
    with open(path, encoding="ascii") as lines:
        for line in lines:
            words = line.split(maxsplit=4)
            if words[3] == _HALF_OPEN:
                port = Port(Protocol.TCP, int(words[1].rpartition(":")[2], 16))
                if port in ports:
                    yield port
