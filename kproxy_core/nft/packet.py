"""A packet, its connection and its node, as the rules at one hook see them. Pure.

Bits of states and statuses are those of linux/netfilter/nf_conntrack_common.h, types of routes those of
linux/rtnetlink.h.
"""

import enum
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from kproxy_core.model.address import Address, Family

Bytes = tuple[int | str, ...]
"""Bytes; a text for one that is not known, which names the field."""
Number = int | str
"""A number, or a text if it is not known, which tells why."""


class Interface(NamedTuple):
    name: str
    number: int


NO_INTERFACE: Final = Interface("", 0)
"""That of a packet which did not arrive, or which is not going to leave."""
LOOPBACK: Final = Interface("lo", 1)


class Flow(NamedTuple):
    """Addresses and ports in one direction of a connection. None: not known."""

    source: Address | None
    destination: Address | None
    source_port: int | None
    port: int | None

    def reversed(self) -> "Flow":
        source, destination, source_port, port = self
        return Flow(destination, source, port, source_port)


_TCP, _UDP = 6, 17
SYN: Final = 2
"""The flag of TCP's first packet."""


class Packet(NamedTuple):
    """The headers of a packet without IP options and extension headers."""

    family: Family
    protocol: int
    network: Bytes
    transport: Bytes
    is_sound: bool = True
    """Its checksums are right."""

    @classmethod
    def of(cls, family: Family, protocol: int, flow: Flow, flags: int = SYN) -> "Packet":
        """Return a packet of *flow*, with *flags* if it is one of TCP."""
        addresses = (
            *_known(flow.source, family.size, "source address"),
            *_known(flow.destination, family.size, "destination address"))
        network: Bytes
        if family is Family.IPV4:
            network = (
                0x45, "ip dscp", *["ip length"] * 2, *["ip id"] * 2, *["ip frag-off"] * 2, "ip ttl", protocol,
                *["ip checksum"] * 2, *addresses)
        else:
            network = (*["ip6 flowlabel"] * 4, *["ip6 length"] * 2, protocol, "ip6 hoplimit", *addresses)
        ports = (*_port(flow.source_port, "source port"), *_port(flow.port, "destination port"))
        if protocol == _TCP:
            rest: Bytes = (
                *["tcp sequence"] * 4, *["tcp ackseq"] * 4, "tcp doff", flags, *["tcp window"] * 2,
                *["tcp checksum"] * 2, *["tcp urgptr"] * 2)
        elif protocol == _UDP:
            rest = (*["udp length"] * 2, *["udp checksum"] * 2)
        else:
            rest = ()
        return cls(family, protocol, network, (*ports, *rest))

    @property
    def flow(self) -> Flow:
        return _flow(self.family, self.network, self.transport)

    @property
    def destination(self) -> Address | None:
        return _address(self.network[-self.family.size :])

    @property
    def addresses_at(self) -> int:
        """The position of the addresses in the network's header."""
        return 12 if self.family is Family.IPV4 else 8

    @property
    def flags(self) -> Number:
        """Those of TCP."""
        return self.transport[13] if self.protocol == _TCP else "tcp flags"

    def with_flow(self, flow: Flow) -> "Packet":
        size, at = self.family.size, self.addresses_at
        addresses = (
            *_known(flow.source, size, "source address"),
            *_known(flow.destination, size, "destination address"))
        ports = (*_port(flow.source_port, "source port"), *_port(flow.port, "destination port"))
        return Packet(
            self.family, self.protocol, (*self.network[:at], *addresses), (*ports, *self.transport[4:]),
            self.is_sound)

    def load(self, base: int, offset: int, size: int) -> Bytes:
        """Return bytes from a header on: 1 of the network's, 2 of the transport's (NFT_PAYLOAD_*)."""
        if base == 1 and offset + size <= len(self.network):  # Most loads.
            return self.network[offset : offset + size]
        data = {1: self.network + self.transport, 2: self.transport}.get(base, ())
        found = data[offset : offset + size]
        return found + (_BEHIND.get(base, "payload"),) * (size - len(found))

    def store(self, base: int, offset: int, value: Bytes) -> "Packet":
        """Return the packet with other bytes in its headers. The rest of *value* is not kept."""
        if base not in (1, 2):
            return self
        header = self.network if base == 1 else self.transport
        changed = (*header[:offset], *value, *header[offset + len(value) :])[: len(header)]
        return self._replace(network=changed) if base == 1 else self._replace(transport=changed)


_BEHIND = {0: "link-layer header", 3: "inner header", 4: "tunnel header"}


@lru_cache(maxsize=4096)  # One packet is asked about many times.
def _flow(family: Family, network: Bytes, transport: Bytes) -> Flow:
    at = len(network) - 2 * family.size
    return Flow(
        _address(network[at : at + family.size]), _address(network[at + family.size :]),
        _number(transport[:2]), _number(transport[2:4]))


def _known(address: Address | None, size: int, name: str) -> Bytes:
    return tuple(address) if address is not None else (name,) * size


def _port(port: int | None, name: str) -> Bytes:
    return tuple(port.to_bytes(2, "big")) if port is not None else (name,) * 2


def _address(value: Bytes) -> Address | None:
    found = known_bytes(value)
    return None if found is None else Address(found)


def _number(value: Bytes) -> int | None:
    found = known_bytes(value)
    return None if found is None else int.from_bytes(found, "big")


def known_bytes(value: Bytes) -> bytes | None:
    """Return the bytes of *value*; None if one is not known."""
    try:
        return bytes(value)  # type: ignore[arg-type]
    except TypeError:
        return None


class Tracking(enum.Enum):
    """What connection tracking knows of a packet."""

    NOT_YET = "not yet"
    TEMPLATE = "template"
    """A rule has said how to track it."""
    UNTRACKED = "untracked"
    TRACKED = "tracked"

    __hash__ = object.__hash__  # Enum's is a Python function.


class Status(enum.IntEnum):
    """Bits of a connection's status (IPS_*)."""

    CONFIRMED = 8
    SRC_NAT = 16
    DST_NAT = 32
    SRC_NAT_DONE = 128
    DST_NAT_DONE = 256


class Place(NamedTuple):
    """A rule, or the policy of a base chain."""

    family: str
    table: str
    chain: str
    rule: int | None
    """Position in the chain, from 1; None: the chain's policy."""
    handle: int
    """nft's handle of the rule; 0: none."""

    @property
    def text(self) -> str:
        return f"in rule {self.rule} of chain {self.chain}"


class Connection(NamedTuple):
    """A connection of which the first packet is on its way."""

    original: Flow
    reply: Flow
    status: int = 0
    """Bits of `Status`."""
    mark: Number = 0
    labels: Number = 0
    zone: Number = 0
    helper: Number = 0
    """0: none."""
    translated_by: Place | None = None
    """The rule that has decided the destination."""

    def translated(self, reply: Flow, status: int, by: Place | None) -> "Connection":
        """Return it with another reply, status and rule. Faster than `_replace`."""
        original, _, _, mark, labels, zone, helper, _ = self
        return Connection(original, reply, status, mark, labels, zone, helper, by)


class Seen(NamedTuple):
    """The first packet of a connection, as the rules at one place of its way see it."""

    packet: Packet
    input: Interface | None
    """None: not known."""
    output: Interface | None
    is_from_node: bool
    mark: Number = 0
    tracking: Tracking = Tracking.NOT_YET
    connection: Connection | None = None
    rerouted: Interface | None = NO_INTERFACE
    """The interface by which it leaves behind hook ``output``, if a rule has changed its route."""
    untracked_by: Place | None = None
    """The rule that has exempted it from connection tracking, so that nothing translates it."""

    def translated(self, packet: Packet, connection: Connection) -> "Seen":
        """Return it with other headers, in another state of its connection. Faster than `_replace`."""
        _, input_, output, is_from_node, mark, tracking, _, rerouted, untracked_by = self
        return Seen(
            packet, input_, output, is_from_node, mark, tracking, connection, rerouted, untracked_by)


RTN_UNSPEC, RTN_UNICAST, RTN_LOCAL, RTN_BROADCAST, RTN_ANYCAST, RTN_MULTICAST, RTN_UNREACHABLE = (
    0, 1, 2, 3, 4, 5, 7)


class Route(NamedTuple):
    type: int
    """RTN_*; RTN_UNREACHABLE without a route."""
    output: Interface | None
    """None: not known."""
    why: str = ""
    """Why a packet does not pass, without a route."""


class Depends(NamedTuple):
    """Neither yes nor no."""

    why: str


class Share(NamedTuple):
    """Yes for a part of all packets."""

    yes: float
    """From 0 to 1."""
    why: str


Answer = bool | Depends | Share


class Node(NamedTuple):
    """What is known of the node whose rules a packet meets."""

    route: Callable[[Address, Number], Route | None]
    """Returns the route to an address for packets with a mark; None: not known."""
    addresses: Callable[[Interface, Family], Sequence[Address]] = lambda interface, family: ()
    """Returns the addresses of an interface, the one first that it translates to; (): not known."""
    in_ipset: Callable[[str, Sequence[str], Packet], int | Depends | None] = (
        lambda name, sides, packet: Depends("match set"))
    """Returns the mark of the packet's entry in an ipset, 0 without marks; None without an entry."""
    is_recent: Callable[[str, Address | None], bool | Depends] = (
        lambda name, source: Depends("match recent"))
    """Returns whether a list of match ``recent`` holds an address."""
    is_bridged: Callable[[Address | None], bool | Depends] = lambda source: Depends("match physdev")
    """Returns whether packets of a sender are on a bridge's port when they meet the rules."""
    has_ingress_first: Callable[[Interface], bool] = lambda interface: True
    """Returns whether packets pass hook ``ingress`` of an interface before those of IP: with br_netfilter,
    they pass that of a bridge behind them."""
    arriving: Callable[[Seen], Route | None] | None = None
    """Returns the route of a packet that arrived; without it, `route` does."""


# Translation.


class Translation(NamedTuple):
    """A change of the source or the destination (struct nf_nat_range2)."""

    is_source: bool
    first: Address | None = None
    """None: not changed, or not known with `is_known` False."""
    last: Address | None = None
    ports: tuple[int, int] | None = None
    flags: int = 0
    is_known: bool = True
    """False: to an address that is not known."""


RANDOM_PORT = 4 | 16
"""NF_NAT_RANGE_PROTO_RANDOM and _FULLY."""
_OFFSET, _NETMAP = 32, 64
_MOST_ADDRESSES = 256


def translated(
    seen: Seen, translation: Translation, place: Place | None
) -> list[tuple[Seen, float]]:
    """Return the packet after *translation* by a rule, each with its share of connections."""
    connection = seen.connection
    if connection is None:
        return [(seen, 1.0)]
    # Rules may have written other addresses and ports into the packet.
    flow, written = connection.reply.reversed(), seen.packet.flow
    address, port = (flow.source, flow.source_port) if translation.is_source else (
        flow.destination, flow.port)
    found = []
    choices = _addresses(translation, address)
    for choice in choices:
        new = _new_port(translation, port)
        changed = _with_end(flow, choice, new, is_source=translation.is_source)
        on_the_wire = changed if written == flow else _with_end(
            written, choice, new, is_source=translation.is_source)
        status = connection.status | done(is_source=translation.is_source)
        if changed != flow:
            status |= Status.SRC_NAT if translation.is_source else Status.DST_NAT
        by = connection.translated_by if translation.is_source else place
        packet = seen.packet if on_the_wire == written else seen.packet.with_flow(on_the_wire)
        after = connection.translated(changed.reversed(), status, by)
        found.append((seen.translated(packet, after), 1 / len(choices)))
    return found


def _with_end(flow: Flow, address: Address | None, port: int | None, *, is_source: bool) -> Flow:
    if is_source:
        return Flow(address, flow.destination, port, flow.port)
    return Flow(flow.source, address, flow.source_port, port)


def done(*, is_source: bool) -> Status:
    """Return the bit which says that the translation of the source, or of the destination, is decided."""
    return Status.SRC_NAT_DONE if is_source else Status.DST_NAT_DONE


def _addresses(translation: Translation, old: Address | None) -> list[Address | None]:
    first, last = translation.first, translation.last or translation.first
    if not translation.is_known:
        return [None]
    if first is None or last is None:
        return [old]
    if translation.flags & _NETMAP:
        if old is None:
            return [None]
        # The bits in which the two ends agree are those of the network (nft_nat_setup_netmap).
        return [Address(bytes(
            one & ~(one ^ other) & 0xFF | kept & (one ^ other)
            for one, other, kept in zip(first, last, old, strict=True)))]
    if first == last:
        return [first]
    low, high = int.from_bytes(first, "big"), int.from_bytes(last, "big")
    if not 0 <= high - low < _MOST_ADDRESSES:
        return [None]
    return [Address(number.to_bytes(len(first), "big")) for number in range(low, high + 1)]


def _new_port(translation: Translation, old: int | None) -> int | None:
    """Return the port after *translation*; None: any (nf_nat_l4proto_unique_tuple)."""
    ports = translation.ports
    if translation.flags & _OFFSET:
        return None
    if ports is None:
        return None if translation.flags & RANDOM_PORT else old
    if ports[0] == ports[1]:
        return ports[0]
    if translation.flags & RANDOM_PORT or old is None:
        return None
    if ports[0] <= old <= ports[1]:
        return old
    return None if translation.is_source else ports[0]
