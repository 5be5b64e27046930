"""Matches and targets of iptables (linux/netfilter/xt_*.h), and how a packet meets them. Pure.

Rules of nf_tables hold them as bytes: see `match` and `target`. A program that reads the text of
iptables-save makes a `Test` and a `Target` of it.
"""

import struct
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from kproxy_core.model.address import Address, Family
from kproxy_core.nft.packet import (
    NO_INTERFACE,
    RTN_BROADCAST,
    RTN_LOCAL,
    RTN_MULTICAST,
    RTN_UNICAST,
    Answer,
    Depends,
    Flow,
    Interface,
    Node,
    Number,
    Route,
    Seen,
    Share,
    Tracking,
    Translation,
)
from kproxy_core.nft.rules import NF_ACCEPT, NF_DROP, NF_QUEUE, NFT_CONTINUE

STOLEN: Final = 2
"""NF_STOLEN: the kernel answers the packet itself."""
UNKNOWN: Final = -100
"""No verdict of the kernel: what becomes of the packet is not known."""


class Sight(NamedTuple):
    """A packet at a hook of a node."""

    seen: Seen
    hook: str
    node: Node

    @property
    def arrived_by(self) -> Interface | None:
        """Return the interface of arrival as a rule at this hook reads it."""
        if self.hook == "output" or (self.hook == "postrouting" and self.seen.is_from_node):
            return NO_INTERFACE
        return self.seen.input

    @property
    def leaves_by(self) -> Interface | None:
        return NO_INTERFACE if self.hook in ("prerouting", "input") else self.seen.output

    @property
    def dialled(self) -> Flow:
        """Return addresses and ports as the packet was sent."""
        connection = self.seen.connection
        return self.seen.packet.flow if connection is None else connection.original

    @property
    def conntrack_state(self) -> Number:
        """Return the bits of XT_CONNTRACK_STATE_*, or why they are not known."""
        state, connection = self.state(_XT_STATES), self.seen.connection
        if isinstance(state, str) or connection is None:
            return state
        return state | (_XT_SNAT if connection.status & 16 else 0) | (
            _XT_DNAT if connection.status & 32 else 0)

    def route(self, address: Address | None) -> Route | None:
        return None if address is None else self.node.route(address, self.seen.mark)

    def state(self, bits: "StateBits") -> Number:
        """Return the bit of the connection's state, or why it is not known."""
        return bits.of(self.seen.tracking)


class StateBits(NamedTuple):
    invalid: int
    new: int
    untracked: int

    def of(self, tracking: Tracking) -> Number:
        """Return the bit of a connection's state, or why it is not known."""
        if tracking is Tracking.NOT_YET:
            return self.invalid
        if tracking is Tracking.TRACKED:
            return self.new
        return self.untracked if tracking is Tracking.UNTRACKED else "ct zone"


Test = Callable[[Sight], Answer]
"""Returns whether a packet matches."""


def negated(test: Test) -> Test:
    return lambda sight: _inverted(test(sight), True)


class Unreadable(Exception):
    """A match or a target is not one of those known here."""


def match(name: str, revision: int, info: bytes, sight: Sight) -> Answer:
    """Return whether *sight* matches. Raises Unreadable."""
    known = _MATCHES.get(name)
    if known is None:
        raise Unreadable(f"match {name}")
    try:
        return known(sight, revision, info)
    except struct.error:
        raise Unreadable(f"match {name}") from None


def _all(*answers: Answer) -> Answer:
    """Return whether all are true."""
    if False in answers:
        return False
    return next((each for each in answers if each is not True), True)


def _inverted(answer: Answer, inverted: object) -> Answer:
    if not inverted:
        return answer
    if isinstance(answer, Share):
        return Share(1 - answer.yes, answer.why)
    return not answer if isinstance(answer, bool) else answer


def _within(value: int | None, first: int, last: int, why: str) -> Answer:
    return Depends(why) if value is None else first <= value <= last


def _masked(value: Number, mark: int, mask: int) -> Answer:
    return value & mask == mark if isinstance(value, int) else Depends(value)


# Of connections.

_XT_STATES: Final = StateBits(1, 8, 256)
"""XT_CONNTRACK_STATE_*."""
_XT_SNAT, _XT_DNAT = 64, 128
_STATE, _PROTO, _ORIGSRC, _ORIGDST, _REPLSRC, _REPLDST, _STATUS, _EXPIRES = 1, 2, 4, 8, 16, 32, 64, 128
_ORIGSRC_PORT, _ORIGDST_PORT, _REPLSRC_PORT, _REPLDST_PORT, _DIRECTION = 256, 512, 1024, 2048, 4096


def _conntrack(sight: Sight, revision: int, info: bytes) -> Answer:
    seen = sight.seen
    networks = [(info[at : at + 16], info[at + 16 : at + 32]) for at in range(0, 128, 32)]
    if revision not in (1, 2, 3):
        raise Unreadable("match conntrack")
    protocol, *ports, flags, inverted = struct.unpack_from("=7H", info, 136)
    states, statuses = struct.unpack_from("=2B" if revision == 1 else "=2H", info, 150)
    state, connection = sight.conntrack_state, seen.connection
    if isinstance(state, str):
        return Depends(state)
    if flags & _STATE and bool(states & state) is bool(inverted & _STATE):
        return False
    if connection is None:
        return bool(flags & _STATE)
    answers: list[Answer] = []
    if flags & _DIRECTION:
        answers.append(not inverted & _DIRECTION)
    original, reply = connection.original, connection.reply
    compared = (original.source, original.destination, reply.source, reply.destination)
    for bit, address, (wanted, mask) in zip(
            (_ORIGSRC, _ORIGDST, _REPLSRC, _REPLDST), compared, networks, strict=True):
        if flags & bit:
            answers.append(_inverted(_in_network(address, wanted, mask), inverted & bit))
    if flags & _PROTO:
        answers.append((seen.packet.protocol == protocol) is not bool(inverted & _PROTO))
    highs = struct.unpack_from("=4H", info, 154) if revision == 3 else (0,) * 4
    numbers = (original.source_port, original.port, reply.source_port, reply.port)
    for bit, number, low, high in zip(
            (_ORIGSRC_PORT, _ORIGDST_PORT, _REPLSRC_PORT, _REPLDST_PORT), numbers, ports, highs, strict=True):
        if flags & bit:
            first, last = (low, high) if revision == 3 else (_swapped(low),) * 2
            answers.append(_inverted(_within(number, first, last, "ct port"), inverted & bit))
    if flags & _STATUS:
        answers.append(bool(statuses & connection.status) is not bool(inverted & _STATUS))
    if flags & _EXPIRES:
        answers.append(Depends("ct expiration"))
    return _all(*answers)


def _swapped(port: int) -> int:
    """Return a port of network order that was read as one of the host's."""
    return int.from_bytes(port.to_bytes(2, sys.byteorder), "big")


def _in_network(address: Address | None, wanted: bytes, mask: bytes) -> Answer:
    if address is None:
        return Depends("ct address")
    return all((a ^ w) & m == 0 for a, w, m in zip(address, wanted, mask, strict=False))


def _state(sight: Sight, revision: int, info: bytes) -> Answer:
    (mask,) = struct.unpack_from("=I", info)
    state = sight.state(StateBits(1, 8, 64))
    return Depends(state) if isinstance(state, str) else bool(mask & state)


def _connmark(sight: Sight, revision: int, info: bytes) -> Answer:
    mark, mask, inverted = struct.unpack_from("=IIB", info)
    connection = sight.seen.connection
    if connection is None:
        return Depends("ct zone") if sight.seen.tracking is Tracking.TEMPLATE else False
    return _inverted(_masked(connection.mark, mark, mask), inverted)


# Of packets.


def _mark(sight: Sight, revision: int, info: bytes) -> Answer:
    mark, mask, inverted = struct.unpack_from("=IIB", info)
    return _inverted(_masked(sight.seen.mark, mark, mask), inverted)


def _tcp(sight: Sight, revision: int, info: bytes) -> Answer:
    first, last, low, high, option, mask, flags, inverted = struct.unpack_from("=4H4B", info)
    answers = [_ports(sight.seen.packet.flow, first, last, low, high, inverted)]
    if mask:
        answers.append(_inverted(_masked(sight.seen.packet.flags, flags, mask), inverted & 4))
    if option:
        answers.append(Depends("tcp option"))
    return _all(*answers)


def _udp(sight: Sight, revision: int, info: bytes) -> Answer:
    return _ports(sight.seen.packet.flow, *struct.unpack_from("=4HB", info))


def _sctp(sight: Sight, revision: int, info: bytes) -> Answer:
    low, high, first, last = struct.unpack_from("=4H", info)
    flags, inverted = struct.unpack_from("=2I", info, 60)
    flow, answers = sight.seen.packet.flow, []
    if flags & 1:
        answers.append(_inverted(_within(flow.source_port, first, last, "source port"), inverted & 1))
    if flags & 2:
        answers.append(_inverted(_within(flow.port, low, high, "destination port"), inverted & 2))
    if flags & 4:
        answers.append(Depends("match sctp"))
    return _all(*answers)


def _ports(flow: Flow, first: int, last: int, low: int, high: int, inverted: int) -> Answer:
    answers: list[Answer] = []
    for number, start, end, bit, why in (
            (flow.source_port, first, last, 1, "source port"), (flow.port, low, high, 2, "destination port")):
        if (start, end) != (0, 0xFFFF) or inverted & bit:
            whole = (start, end) == (0, 0xFFFF)
            answers.append(_inverted(True if whole else _within(number, start, end, why), inverted & bit))
    return _all(*answers)


def _multiport(sight: Sight, revision: int, info: bytes) -> Answer:
    if revision != 1:
        raise Unreadable("match multiport")
    which, count, *rest = struct.unpack_from("=2B15H15BB", info)
    ports, pairs, inverted = rest[:15], rest[15:30], rest[30]
    ranges, at = [], 0
    while at < min(count, 15):
        is_pair = bool(pairs[at]) and at + 1 < 15
        ranges.append((ports[at], ports[at + 1] if is_pair else ports[at]))
        at += 2 if is_pair else 1
    flow = sight.seen.packet.flow
    numbers = {0: [flow.source_port], 1: [flow.port], 2: [flow.source_port, flow.port]}.get(which)
    if numbers is None:
        raise Unreadable("match multiport")
    is_in = any(number is not None and low <= number <= high for number in numbers for low, high in ranges)
    if not is_in and None in numbers:
        return Depends("source port" if flow.source_port is None else "destination port")
    return _inverted(is_in, inverted)


def _iprange(sight: Sight, revision: int, info: bytes) -> Answer:
    if revision != 1:
        raise Unreadable("match iprange")
    (flags,) = struct.unpack_from("=B", info, 64)
    flow, answers = sight.seen.packet.flow, []
    for address, at, bit, inverted in ((flow.source, 0, 1, 16), (flow.destination, 32, 2, 32)):
        if flags & bit:
            size = sight.seen.packet.family.size
            first, last = info[at : at + size], info[at + 16 : at + 16 + size]
            inside: Answer = Depends("address") if address is None else first <= address <= last
            answers.append(_inverted(inside, flags & inverted))
    return _all(*answers)


def is_multicast(address: Address) -> bool:
    return 224 <= address[0] < 240 if len(address) == 4 else address[0] == 0xFF


def address_type(sight: Sight, address: Address | None) -> int | None:
    """Return the RTN_* type of *address* as the routes have it; None: not known."""
    if address is None:
        return None
    if is_multicast(address):
        return RTN_MULTICAST
    route = sight.route(address)
    return None if route is None else route.type


def _addrtype(sight: Sight, revision: int, info: bytes) -> Answer:
    if revision == 1:
        source, destination, flags = struct.unpack_from("=HHI", info)
    else:
        source, destination, *both = struct.unpack_from("=HHII", info)
        flags = bool(both[0]) | bool(both[1]) << 1
    flow, answers = sight.seen.packet.flow, []
    for types, address, inverted in (
            (source, flow.source, flags & 1), (destination, flow.destination, flags & 2)):
        if types:
            answers.append(_inverted(_is_of_type(sight, types, address, flags), inverted))
    return _all(*answers)


_IFACE_IN, _IFACE_OUT = 4, 8
_UNSPEC, _UNICAST, _BY_ROUTE = 1, 1 << 1, 1 << 2 | 1 << 4 | 1 << 7
"""XT_ADDRTYPE_*; those for which IPv6 looks for a route are LOCAL, ANYCAST and UNREACHABLE."""


def _is_of_type(sight: Sight, types: int, address: Address | None, flags: int) -> Answer:
    kind = address_type(sight, address)
    if kind is None or address is None:
        return Depends("addrtype")
    if kind == RTN_LOCAL and flags & (_IFACE_IN | _IFACE_OUT):
        return Depends("addrtype on an interface")
    if sight.seen.packet.family is Family.IPV4:
        return bool(types & 1 << kind)
    is_group, is_unspecified = kind == RTN_MULTICAST, not any(address)
    if (types & 1 << RTN_MULTICAST and not is_group) or (types & _UNSPEC and not is_unspecified) or (
            types & _UNICAST and (is_group or is_unspecified)):
        return False
    return bool(types & _BY_ROUTE & 1 << kind) if types & _BY_ROUTE else True


def _rpfilter(sight: Sight, revision: int, info: bytes) -> Answer:
    (flags,) = struct.unpack_from("=B", info)
    return _inverted(_has_way_back(sight, is_loose=bool(flags & 1), is_local_fine=bool(flags & 4)), flags & 8)


def _has_way_back(sight: Sight, *, is_loose: bool, is_local_fine: bool) -> Answer:
    arrived = sight.arrived_by
    route = sight.route(sight.seen.packet.flow.source)
    if arrived is not None and arrived.name == "lo":
        return True
    if route is None or arrived is None:
        return Depends("rpfilter")
    if route.type != RTN_UNICAST and not (route.type == RTN_LOCAL and is_local_fine):
        return False
    if is_loose:
        return True
    return Depends("rpfilter") if route.output is None else route.output == arrived


def packet_type(sight: Sight) -> int | None:
    """Return the PACKET_* type, which is 0 for one host; None: not known."""
    destination = sight.seen.packet.flow.destination
    if destination is None or is_multicast(destination):
        return None
    route = sight.route(destination)
    return None if route is None or route.type == RTN_BROADCAST else 0


def _pkttype(sight: Sight, revision: int, info: bytes) -> Answer:
    wanted, inverted = struct.unpack_from("=2i", info)
    kind = packet_type(sight)
    return Depends("match pkttype") if kind is None else _inverted(kind == wanted, inverted)


def _owner(sight: Sight, revision: int, info: bytes) -> Answer:
    wanted, inverted = struct.unpack_from("=2B", info, 16)
    if sight.seen.is_from_node and sight.hook in ("output", "postrouting"):
        return Depends("match owner")
    return not wanted ^ inverted


def _cgroup(sight: Sight, revision: int, info: bytes) -> Answer:
    has_socket = sight.seen.is_from_node and sight.hook in ("output", "postrouting")
    return Depends("match cgroup") if has_socket else False


def _statistic(sight: Sight, revision: int, info: bytes) -> Answer:
    mode, flags, number = struct.unpack_from("=HHI", info)
    if mode > 1:
        raise Unreadable("match statistic")
    yes = number / (1 << 31) if mode == 0 else 1 / (number + 1)
    return _inverted(Share(min(yes, 1.0), "match statistic"), flags & 1)


def _recent(sight: Sight, revision: int, info: bytes) -> Answer:
    does, inverted = struct.unpack_from("=2B", info, 8)
    if does & _RECENT_SET:
        return not inverted
    name = info[10:210].split(b"\0")[0].decode(errors="replace")
    return _inverted(sight.node.is_recent(name, sight.seen.packet.flow.source), inverted)


_RECENT_SET = 2
"""XT_RECENT_SET: it adds the sender to a list, and always matches."""


def _physdev(sight: Sight, revision: int, info: bytes) -> Answer:
    inverted, does = struct.unpack_from("=2B", info, 64)
    if does != _PHYSDEV_IS_IN:
        raise Unreadable("match physdev")
    return _inverted(sight.node.is_bridged(sight.seen.packet.flow.source), inverted & _PHYSDEV_IS_IN)


_PHYSDEV_IS_IN = 8
"""XT_PHYSDEV_OP_ISIN."""

_MATCHES: Final[dict[str, Callable[[Sight, int, bytes], Answer]]] = {
    "comment": lambda sight, revision, info: True,
    "conntrack": _conntrack, "state": _state, "connmark": _connmark, "mark": _mark, "addrtype": _addrtype,
    "rpfilter": _rpfilter, "tcp": _tcp, "udp": _udp, "sctp": _sctp, "multiport": _multiport,
    "iprange": _iprange, "recent": _recent, "physdev": _physdev,
    "owner": _owner, "pkttype": _pkttype, "cgroup": _cgroup, "statistic": _statistic,
    # The packets of which this tells have no extension headers.
    **dict.fromkeys(("rt", "frag", "hbh", "dst", "ah", "esp", "mh"), lambda sight, revision, info: False),
}  # fmt: skip


# Targets.


class Effect(NamedTuple):
    """What a target does."""

    seen: Seen
    verdict: int = NFT_CONTINUE
    translation: Translation | None = None
    rejects: bool = False


class Target(NamedTuple):
    """The target of a rule in iptables' text."""

    act: Callable[[Sight], Effect]
    """Returns what it does with a packet. Raises Unreadable."""


def target(name: str, revision: int, info: bytes, sight: Sight) -> Effect:
    """Return the effect of a target. Raises Unreadable."""
    seen = sight.seen
    if name in WITHOUT_EFFECT:
        return Effect(seen)
    known = _TARGETS.get(name)
    if known is None:
        raise Unreadable(f"target {name}")
    try:
        return known(sight, revision, info)
    except struct.error:
        raise Unreadable(f"target {name}") from None


WITHOUT_EFFECT: Final = frozenset({
    "AUDIT", "CHECKSUM", "CLASSIFY", "CONNSECMARK", "DSCP", "HL", "IDLETIMER", "LED", "LOG", "NFLOG",
    "RATEEST", "SECMARK", "SET", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TRACE", "TTL", "ULOG", "ECN",
})  # fmt: skip
"""Targets that neither end a packet nor change what is known of it."""


def _set_mark(sight: Sight, revision: int, info: bytes) -> Effect:
    if revision != 2:
        raise Unreadable("target MARK")
    mark, mask = struct.unpack_from("=II", info)
    return Effect(sight.seen._replace(mark=changed_mark(sight.seen.mark, mask, mark)))


def changed_mark(old: Number, mask: int, new: Number) -> Number:
    if isinstance(new, str):
        return new
    if mask == 0xFFFFFFFF:
        return new
    return old & ~mask & 0xFFFFFFFF ^ new if isinstance(old, int) else old


def _set_connmark(sight: Sight, revision: int, info: bytes) -> Effect:
    seen, connection = sight.seen, sight.seen.connection
    if revision == 1:
        mark, mask, packets, mode = struct.unpack_from("=3IB", info)
        shift = 0
    elif revision == 2:
        mark, mask, packets, _, shift, mode = struct.unpack_from("=3I3B", info)
    else:
        raise Unreadable("target CONNMARK")
    if connection is None:
        return Effect(seen)
    if mode == 2:
        restored = connection.mark & mask if isinstance(connection.mark, int) else connection.mark
        return Effect(seen._replace(mark="CONNMARK" if shift else changed_mark(seen.mark, packets, restored)))
    saved = seen.mark & packets if isinstance(seen.mark, int) else seen.mark
    given = saved if mode == 1 else mark
    new = "CONNMARK" if shift else changed_mark(connection.mark, mask, given)
    return Effect(seen._replace(connection=connection._replace(mark=new)))


def _track(sight: Sight, revision: int, info: bytes) -> Effect:
    (flags,) = struct.unpack_from("=H", info)
    return Effect(untracked(sight.seen) if flags & 1 else with_template(sight.seen))


def untracked(seen: Seen) -> Seen:
    """Return the packet after a rule that exempts it from connection tracking."""
    return seen._replace(tracking=Tracking.UNTRACKED) if seen.tracking is Tracking.NOT_YET else seen


def with_template(seen: Seen) -> Seen:
    return seen._replace(tracking=Tracking.TEMPLATE) if seen.tracking is Tracking.NOT_YET else seen


def _nat(sight: Sight, revision: int, info: bytes, *, is_source: bool) -> Effect:
    if sight.seen.packet.family is Family.IPV4 and revision == 0:
        count, flags = struct.unpack_from("=2I", info)
        first, last = info[8:12], info[12:16]
        ports = struct.unpack_from(">2H", info, 16)
        if count != 1:
            raise Unreadable("target with several ranges")
    else:
        size = sight.seen.packet.family.size
        (flags,) = struct.unpack_from("=I", info)
        first, last = info[4 : 4 + size], info[20 : 20 + size]
        ports = struct.unpack_from(">2H", info, 36)
    has_address = flags & 1
    return Effect(sight.seen, NF_ACCEPT, Translation(
        is_source, Address(first) if has_address else None, Address(last) if has_address else None,
        (ports[0], ports[1]) if flags & 2 else None, flags))


def _masquerade(sight: Sight, revision: int, info: bytes) -> Effect:
    effect = _nat(sight, revision, info, is_source=True)
    assert effect.translation is not None
    return effect._replace(translation=to_interface(
        sight, sight.seen.output, effect.translation._replace(is_source=True)))


def _redirect(sight: Sight, revision: int, info: bytes) -> Effect:
    effect = _nat(sight, revision, info, is_source=False)
    assert effect.translation is not None
    return effect._replace(translation=redirected(sight, effect.translation))


def redirected(sight: Sight, translation: Translation) -> Translation:
    """Return a translation to this node: to the interface of arrival, or for the node's packets to itself."""
    if sight.hook == "output":
        own = sight.seen.packet.family.loopback
        return translation._replace(first=own, last=own)
    return to_interface(sight, sight.seen.input, translation)


def to_interface(sight: Sight, interface: Interface | None, translation: Translation) -> Translation:
    """Return a translation to the first address of an interface."""
    family = sight.seen.packet.family
    own = next(iter(sight.node.addresses(interface, family)), None) if interface is not None else None
    return translation._replace(first=own, last=own, is_known=own is not None)


def _map_network(sight: Sight, revision: int, info: bytes) -> Effect:
    effect = _nat(sight, revision, info, is_source=sight.hook in ("postrouting", "input"))
    assert effect.translation is not None
    return effect._replace(translation=effect.translation._replace(flags=effect.translation.flags | 64))


_TARGETS: Final[dict[str, Callable[[Sight, int, bytes], Effect]]] = {
    "MARK": _set_mark, "CONNMARK": _set_connmark, "CT": _track,
    "NOTRACK": lambda sight, revision, info: Effect(untracked(sight.seen)),
    "DNAT": lambda sight, revision, info: _nat(sight, revision, info, is_source=False),
    "SNAT": lambda sight, revision, info: _nat(sight, revision, info, is_source=True),
    "MASQUERADE": _masquerade, "REDIRECT": _redirect, "NETMAP": _map_network,
    "REJECT": lambda sight, revision, info: Effect(sight.seen, NF_DROP, rejects=True),
    "NFQUEUE": lambda sight, revision, info: Effect(sight.seen, NF_QUEUE),
    "SYNPROXY": lambda sight, revision, info: Effect(sight.seen, STOLEN),
    "HMARK": lambda sight, revision, info: Effect(sight.seen._replace(mark="HMARK")),
}  # fmt: skip
