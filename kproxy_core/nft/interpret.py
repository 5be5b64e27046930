"""The way of a packet through filter chains of other programs, as the kernel lists them. Pure.

Firewalls write more kinds of rules than are known here. Where one is not understood, the packet is followed
both as if the rule matched and as if it did not, and the result says so. Attributes are those of
linux/netfilter/nf_tables.h, and of linux/netfilter/xt_*.h for rules of iptables.
"""

import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from kproxy_core.model import address as net
from kproxy_core.model.address import Address, Family
from kproxy_core.netlink.messages import Malformed, attribute_spans, attributes, text
from kproxy_core.nft.elements import Element
from kproxy_core.nft.rules import Attributes, Expression, HeldRule, Verdict, parse_verdict


class Interface(NamedTuple):
    name: str
    number: int


NO_INTERFACE: Final = Interface("", 0)
"""That of a packet which did not arrive, or which is not going to leave."""


class FilteredPacket(NamedTuple):
    """The first packet of a connection at one hook. None: not known."""

    family: Family
    protocol: net.Protocol
    source: Address | None
    destination: Address | None
    port: int | None
    """Destination port."""
    input: Interface | None
    output: Interface | None
    dialled: Address | None
    """The destination before any translation, and its port."""
    dialled_port: int | None
    is_translated: bool
    is_from_node: bool
    is_to_node: bool
    mark: int | None = 0
    """At the first hook, behind the translation, which may set it. Chains may change it on the way."""


class BaseChain(NamedTuple):
    """A chain at a hook."""

    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``, ..."""
    table: str
    name: str
    type: str
    hook: str
    priority: int
    drops_by_policy: bool
    packets: int | None
    """Packets that met the policy; None: not counted."""


class HeldSet(NamedTuple):
    """A set or map that the kernel lists."""

    key_size: int
    """Bytes."""
    is_interval: bool
    parts: tuple[int, ...]
    """Bytes of each part of a concatenation of intervals; () else."""
    elements: Sequence[Element]

    def find(self, value: bytes) -> Element | None:
        """Return the element whose key is *value*, or whose interval holds it."""
        keyed = [each for each in self.elements if each.key]
        for_all = next((each for each in self.elements if not each.key), None)
        if self.parts:
            return next((each for each in keyed if self._holds(each, value)), for_all)
        if not self.is_interval:
            return next((each for each in keyed if each.key == value), for_all)
        # At the same key, one interval may end and the next one start.
        nearest = max(
            (each for each in keyed if each.key <= value), key=lambda each: (each.key, not each.is_end),
            default=None)
        return nearest if nearest is not None and not nearest.is_end else for_all

    def _holds(self, element: Element, value: bytes) -> bool:
        at, last = 0, element.last or element.key
        for size in self.parts:
            if not element.key[at : at + size] <= value[at : at + size] <= last[at : at + size]:
                return False
            at += -(-size // 4) * 4
        return True


class Filters(Protocol):
    """The chains, rules and sets that the kernel lists. All raise OSError."""

    def base_chains(self) -> Sequence[BaseChain]:
        """Return the chains at hooks that filter, and are in effect.

        Those that translate are left out: iptables has no DROP there.
        """

    def rules(self, family: str, table: str, chain: str) -> Sequence[HeldRule]: ...

    def held_set(self, family: str, table: str, name: str) -> HeldSet | None: ...


class Drop(NamedTuple):
    """A place where the packet ends, or may end."""

    family: str
    table: str
    chain: str
    rule: int | None
    """Position in the chain, from 1; None: the chain's policy."""
    handle: int
    """nft's handle of the rule; 0: none."""
    rejects: bool
    """The sender is told."""
    packets: int | None
    """Packets that ended here so far; None: not counted."""
    is_met: bool
    """The rule matches the packet; False: it may."""
    doubts: tuple[str, ...]
    """Statements that are not understood, each with its rule, which may match or accept the packet before."""

    @property
    def is_certain(self) -> bool:
        return self.is_met and not self.doubts


DSTNAT, CONNTRACK = -100, -200
"""Priorities of destination NAT and of connection tracking (NF_IP_PRI_NAT_DST, NF_IP_PRI_CONNTRACK)."""


def drops(filters: Filters, way: Iterable[tuple[str, FilteredPacket]]) -> list[Drop]:
    """Return the places where filter chains may end a packet; no further ones after a certain one.

    *way* are the hooks in their order, each with the packet there, which is translated already: chains before
    the translation see it as it was. Tables of service proxies are left out. Raises OSError.
    """
    found: list[Drop] = []
    chains = sorted(filters.base_chains(), key=lambda each: each.priority)
    mark: int | None = 0
    for at, (hook, packet) in enumerate(way):
        mark = mark if at else packet.mark
        for chain in chains:
            if chain.hook != hook or chain.family not in ("inet", packet.family.ip):
                continue
            if _is_of_service_proxy(chain.table):
                continue
            seen = _seen_by(chain, packet._replace(mark=mark))
            walk = _Walk(filters, chain, seen)
            found += walk.ends()
            if walk.mark != seen.mark:
                mark = walk.mark
            if found and found[-1].is_certain:
                return found
    return found


def _seen_by(chain: BaseChain, packet: FilteredPacket) -> FilteredPacket:
    if chain.hook in ("prerouting", "output") and chain.priority < DSTNAT:
        return packet._replace(
            destination=packet.dialled, port=packet.dialled_port, is_translated=False,
            mark=None if packet.mark else packet.mark)
    return packet


def _is_of_service_proxy(table: str) -> bool:
    """Return whether *table* is one of kproxy's or kube-proxy's, which ``kproxy explain`` reads by itself."""
    return table in ("kproxy", "kube-proxy") or table.startswith("kproxy-")


_SERVICE_CHAIN: Final = re.compile(
    r"KUBE-(SERVICES|EXTERNAL-SERVICES|NODEPORTS|NODE-PORT|NODEPORT-NON-LOCAL|PROXY-FIREWALL|"
    r"SOURCE-RANGES-FIREWALL|[A-Z]+-(FILTER|OUT-FILTER|ACCESS|SHORT-CIRCUIT))")
"""Filter chains of service proxies in the tables of iptables, which are not other programs' either.
KUBE-FORWARD is not among them: it accepts packets before others drop them."""


# Verdicts (linux/netfilter.h, enum nft_verdicts), and the end of a chain.

_DROP, _QUEUE = 0, 3
_CONTINUE, _BREAK, _JUMP, _GOTO, _RETURN = -1, -2, -3, -4, -5

_MOST_RULES = 20_000
"""Rules that one packet may meet: chains may be reached on many ways."""

_Words = dict[int, bytes | None]


class _NotKnown(Exception):
    """An expression is not understood."""


class _Broken(Exception):
    """The rule does not match."""


class _Walk:
    """The way through one base chain."""

    def __init__(self, filters: Filters, base: BaseChain, packet: FilteredPacket) -> None:
        self._filters = filters
        self._base = base
        self._packet = packet
        self.mark = packet.mark
        self._ends: list[Drop] = []
        self._doubts: dict[str, None] = {}
        """Those about rules that may have accepted the packet."""
        self._met = 0

    def ends(self) -> list[Drop]:
        """Return the places where the packet may end, the last one for certain if one is."""
        is_final = self._chain(self._base.name, ())
        unclear = (f"more than {_MOST_RULES:,} rules",) if self._met > _MOST_RULES else ()
        if unclear or (not is_final and self._base.drops_by_policy):
            self._end(self._base.name, None, 0, self._base.packets, unclear, rejects=False)
        return self._ends

    def _end(
        self, chain: str, number: int | None, handle: int, packets: int | None, unclear: tuple[str, ...], *,
        rejects: bool,
    ) -> None:
        self._ends.append(Drop(
            self._base.family, self._base.table, chain, number, handle, rejects, packets, not unclear,
            tuple(dict.fromkeys((*self._doubts, *unclear)))))

    def _chain(self, name: str, unclear: tuple[str, ...]) -> bool:
        """Return whether the packet has met a final verdict for certain, if it has met the chain for certain.

        *unclear*: the reasons why it is not certain that the packet meets the chain.
        """
        for number, rule in enumerate(self._filters.rules(self._base.family, self._base.table, name), 1):
            self._met += 1
            if self._met > _MOST_RULES:
                return True
            run = _Run(self._filters, self._base, self._packet, self.mark)
            verdict, problems = run.verdict(rule.expressions)
            if verdict is None:
                continue
            here = tuple(f"{problem} in rule {number} of chain {name}" for problem in problems)
            why = (*unclear, *here)
            self.mark = run.mark if not why or run.mark == self.mark else None
            end = self._apply(verdict, name, number, rule, run, why)
            if end is None:
                continue
            if not here:  # As certain as the chain itself: the rest of it is not met.
                return end and not why
            if verdict.code in (_RETURN, _GOTO):
                unclear = why
        return False

    def _apply(
        self, verdict: Verdict, name: str, number: int, rule: HeldRule, run: "_Run", why: tuple[str, ...],
    ) -> bool | None:
        """Apply the verdict of a rule. None: the next rule decides; else as `_chain`."""
        if verdict.code == _DROP:
            self._end(name, number, rule.handle, run.packets, why, rejects=run.rejects)
            return True
        if verdict.code in (_JUMP, _GOTO):
            if _SERVICE_CHAIN.fullmatch(verdict.chain):
                return None if verdict.code == _JUMP else False
            end = self._chain(verdict.chain, why)
            return True if end else (None if verdict.code == _JUMP else False)
        if verdict.code == _RETURN:
            return False
        if verdict.code in (_CONTINUE, _BREAK):
            return None
        if verdict.code & 0xFF == _QUEUE:
            why = (*why, f"queue in rule {number} of chain {name}")
        self._doubts.update(dict.fromkeys(why))
        return True


def _u32(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _host(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, sys.byteorder)


def _data(value: bytes) -> bytes:
    return attributes(value).get(1, b"")


_INTERVAL = 4


def parse_held_set(found: Attributes, elements: Sequence[Element]) -> HeldSet:
    """Return a set with its listed attributes."""
    fields = attributes(found.get(9, b"")).get(2, b"")
    spans = attribute_spans(fields, 0, len(fields))
    sizes = (_u32(attributes(fields, start, end)[1]) for _, start, end in spans)
    is_interval = bool(_u32(found.get(3, b"")) & _INTERVAL)
    return HeldSet(_u32(found.get(5, b"")), is_interval, tuple(sizes) if is_interval else (), elements)


def parse_base_chain(family: str, found: Attributes) -> BaseChain | None:
    """Return a listed chain; None if it is not at a hook."""
    hook = attributes(found.get(4, b""))
    if 1 not in hook or _u32(hook[1]) >= len(_HOOKS):
        return None
    counted = attributes(found[8]).get(2) if 8 in found else None
    return BaseChain(
        family, text(found[1]), text(found[3]), text(found.get(7, b"")), _HOOKS[_u32(hook[1])],
        int.from_bytes(hook.get(2, b""), "big", signed=True), _u32(found.get(5, bytes([1]))) == _DROP,
        None if counted is None else _u32(counted))


_HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting")


class _Run:
    """The run of one rule's expressions. Registers are words of four bytes, None where not known."""

    def __init__(self, filters: Filters, base: BaseChain, packet: FilteredPacket, mark: int | None) -> None:
        self._filters = filters
        self._base = base
        self._packet = packet
        self.mark = mark
        self.packets: int | None = None
        self.rejects = False
        self._words: _Words = {}
        self._problems: dict[str, None] = {}
        self._verdict = Verdict(_CONTINUE)

    def verdict(self, expressions: Sequence[Expression]) -> tuple[Verdict | None, tuple[str, ...]]:
        """Return the verdict, None if the rule does not match, and what makes it unclear whether it does."""
        try:
            for expression in expressions:
                step = _STEPS.get(expression.name)
                try:
                    if step is not None:
                        step(self, expression.attributes)
                    elif expression.name not in _WITHOUT_EFFECT:
                        raise _NotKnown(expression.name)
                except _NotKnown as problem:
                    self._problems[str(problem)] = None
                    self._words.clear()
                except (KeyError, ValueError, Malformed):  # Attributes of a newer kernel.
                    self._problems[expression.name] = None
                    self._words.clear()
                if self._verdict.code != _CONTINUE:
                    break
        except _Broken:
            return None, ()
        return self._verdict, tuple(self._problems)

    # Registers.

    def _store(self, register: bytes, value: bytes | None, size: int) -> None:
        word = _word(register, size)
        for at in range(-(-size // 4)):
            part = None if value is None else value[at * 4 : at * 4 + 4].ljust(4, b"\0")
            self._words[word + at] = part

    def _load(self, register: bytes, size: int) -> bytes | None:
        word = _word(register, size)
        parts = [self._words.get(word + at) for at in range(-(-size // 4))]
        return None if None in parts else b"".join(filter(None, parts))[:size]

    def _decide(self, is_match: bool | None, what: str) -> None:
        """End the rule if it does not match; None: that is not known."""
        if is_match is None:
            self._problems[what] = None
        elif not is_match:
            raise _Broken

    # Expressions that load a value.

    def _payload(self, found: Attributes) -> None:
        if 5 in found:  # It writes the header.
            return
        base, offset, size = (_u32(found[kind]) for kind in (2, 3, 4))
        header = {1: _network_header, 2: _transport_header}.get(base, lambda _: [])(self._packet)
        part = header[offset : offset + size]
        known = bytes(byte for byte in part if byte is not None)
        self._store(found[1], known if len(known) == size else None, size)

    def _meta(self, found: Attributes) -> None:
        key = _u32(found[2])
        if 3 in found:
            if key == 3:
                value = self._load(found[3], 4)
                self.mark = None if value is None else int.from_bytes(value, sys.byteorder)
            return
        packet, hook = self._packet, self._base.hook
        has_arrived = hook not in ("output", "postrouting") or not packet.is_from_node
        arrived = packet.input if has_arrived else NO_INTERFACE
        leaves = NO_INTERFACE if hook in ("prerouting", "input") else packet.output
        values: dict[int, tuple[bytes | None, int]] = {
            1: (b"\x08\x00" if packet.family is Family.IPV4 else b"\x86\xdd", 2),
            3: (None if self.mark is None else _host(self.mark), 4),
            4: (arrived and _host(arrived.number), 4), 5: (leaves and _host(leaves.number), 4),
            6: (arrived and _name(arrived), 16), 7: (leaves and _name(leaves), 16),
            15: (bytes([packet.family.af]), 1), 16: (bytes([packet.protocol]), 1),
        }  # fmt: skip
        value, size = values.get(key, (None, 16))
        self._store(found[1], value, size)

    def _ct(self, found: Attributes) -> None:
        if 1 not in found:
            return
        key, packet, base = _u32(found[2]), self._packet, self._base
        if base.hook in ("prerouting", "output") and base.priority < CONNTRACK:
            if key:
                raise _Broken
            self._store(found[1], _host(_INVALID), 4)
            return
        values: dict[int, bytes | None] = {
            0: _host(_NEW), 1: b"\0", 2: _host(_DST_NAT if packet.is_translated else 0), 3: _host(0),
            7: bytes([packet.family.af]), 10: bytes([packet.protocol]),
        }  # fmt: skip
        if found.get(3) == b"\0":  # Of the original direction.
            values |= dict.fromkeys((8, 19, 21), packet.source) | dict.fromkeys((9, 20, 22), packet.dialled)
            values[12] = _port(packet.dialled_port)
        value = values.get(key)
        self._store(found[1], value, len(value) if value is not None else 16)

    def _fib(self, found: Attributes) -> None:
        result, flags, packet = _u32(found[2]), _u32(found[3]), self._packet
        value: bytes | None = None
        if result == 3:
            is_local = packet.is_from_node if flags & 1 else packet.is_to_node
            value = _host(_RTN_LOCAL if is_local else _RTN_UNICAST)
        elif flags & 1 and flags & 8 and packet.input is not None:  # The route back leads where it came from.
            value = _host(1 if flags & 32 else packet.input.number) if result == 1 else _name(packet.input)
        self._store(found[1], value, 16 if result == 2 else 4)

    def _immediate(self, found: Attributes) -> None:
        verdict = parse_verdict(found[2])
        if verdict is not None:
            self._verdict = verdict
        else:
            value = _data(found[2])
            self._store(found[1], value, len(value))

    def _nothing_known(self, found: Attributes) -> None:
        if 1 in found:
            self._store(found[1], None, 16)

    # Expressions that compute with a value, and that match it.

    def _bitwise(self, found: Attributes) -> None:
        size = _u32(found[3])
        value = self._load(found[1], size)
        if _u32(found.get(6, b"")) or 4 not in found:
            value = None
        if value is not None:
            mask, xor = _data(found[4]), _data(found[5])
            value = bytes(a & b ^ c for a, b, c in zip(value, mask, xor, strict=False))
        self._store(found[2], value, size)

    def _byteorder(self, found: Attributes) -> None:
        length, size = _u32(found[4]), _u32(found[5])
        value = self._load(found[1], length)
        if value is not None and sys.byteorder == "little" and size:
            value = b"".join(value[at : at + size][::-1] for at in range(0, length, size))
        self._store(found[2], value, length)

    def _cmp(self, found: Attributes) -> None:
        wanted = _data(found[3])
        value = self._load(found[1], len(wanted))
        is_match = None if value is None else _COMPARED[_u32(found[2])](value, wanted)
        self._decide(is_match, "an unknown value")

    def _range(self, found: Attributes) -> None:
        first, last = _data(found[3]), _data(found[4])
        value = self._load(found[1], len(first))
        is_match = None if value is None else (first <= value <= last) is not bool(_u32(found[2]))
        self._decide(is_match, "an unknown value")

    def _lookup(self, found: Attributes) -> None:
        name = text(found[1])
        held = self._filters.held_set(self._base.family, self._base.table, name)
        value = self._load(found[2], held.key_size) if held is not None else None
        if held is None or value is None:
            raise _NotKnown(f"an unknown value, looked up in set {name}")
        element = held.find(value)
        if (element is None) is not bool(_u32(found.get(5, b"")) & 1):
            raise _Broken
        if element is not None and 3 in found:
            if isinstance(element.data, Verdict):
                self._verdict = element.data
            else:
                value = element.data or b""
                self._store(found[3], value, len(value))

    def _counter(self, found: Attributes) -> None:
        self.packets = _u32(found.get(2, b""))

    def _reject(self, found: Attributes) -> None:
        self.rejects, self._verdict = True, Verdict(_DROP)

    def _queue(self, found: Attributes) -> None:
        self._verdict = Verdict(_QUEUE)

    def _object(self, found: Attributes) -> None:
        if _u32(found.get(1, b"")) in (2, 4):
            raise _NotKnown("a limit or a quota")

    # Matches and targets of iptables.

    def _match(self, found: Attributes) -> None:
        name, info = text(found[1]), found.get(3, b"")
        known = _MATCHES.get(name)
        if known is None:
            raise _NotKnown(f"match {name}")
        try:
            is_match = known(self, _u32(found.get(2, b"")), info)
        except struct.error:
            is_match = None
        self._decide(is_match, f"match {name}")

    def _target(self, found: Attributes) -> None:
        name = text(found[1])
        if name == "REJECT":
            self.rejects, self._verdict = True, Verdict(_DROP)
        elif name == "NFQUEUE":
            self._verdict = Verdict(_QUEUE)
        elif name in ("MARK", "CONNMARK"):
            self.mark = None

    def _xt_conntrack(self, revision: int, info: bytes) -> bool | None:
        form = struct.Struct("=138x4H2H2B" if revision == 1 else "=138x4H2H2H")
        *_, flags, inverted, states, statuses = form.unpack_from(info)
        if flags & ~(_XT_STATE | _XT_STATUS):
            return None
        is_translated = self._packet.is_translated
        if flags & _XT_STATE:
            is_tracked = not (
                self._base.hook in ("prerouting", "output") and self._base.priority < CONNTRACK)
            state = (_NEW if is_tracked else _INVALID) | (_XT_DNAT if is_translated else 0)
            if bool(states & state) is bool(inverted & _XT_STATE):
                return False
        if flags & _XT_STATUS:
            status = _DST_NAT if is_translated else 0
            if bool(statuses & status) is bool(inverted & _XT_STATUS):
                return False
        return True

    def _xt_addrtype(self, revision: int, info: bytes) -> bool | None:
        source, destination, flags = struct.unpack_from("=HHI", info)
        if revision != 1 or flags & ~3:
            return None
        packet = self._packet
        for types, is_local, inverted in (
                (source, packet.is_from_node, flags & 1), (destination, packet.is_to_node, flags & 2)):
            kind = 1 << (_RTN_LOCAL if is_local else _RTN_UNICAST)
            if types and bool(types & kind) is bool(inverted):
                return False
        return True

    def _xt_rpfilter(self, revision: int, info: bytes) -> bool | None:
        """The route back leads where the packet came from, as in `_fib`."""
        (flags,) = struct.unpack_from("=B", info)
        return None if self._packet.input is None else not flags & 8

    def _xt_mark(self, revision: int, info: bytes) -> bool | None:
        mark, mask, inverted = struct.unpack_from("=IIB", info)
        return None if self.mark is None else (self.mark & mask == mark) is not bool(inverted)

    def _xt_tcp(self, revision: int, info: bytes) -> bool | None:
        first, last, low, high, option, mask, flags, inverted = struct.unpack_from("=4H4B", info)
        if option or inverted & ~7:
            return None
        is_syn = None if not mask else (mask & _SYN == flags) is not bool(inverted & 4)
        if is_syn is False:
            return False
        return self._ports(first, last, low, high, inverted)

    def _xt_udp(self, revision: int, info: bytes) -> bool | None:
        return self._ports(*struct.unpack_from("=4HB", info))

    def _ports(self, first: int, last: int, low: int, high: int, inverted: int) -> bool | None:
        port = self._packet.port
        if (low, high) != (0, 0xFFFF):
            if port is None:
                return None
            if (low <= port <= high) is bool(inverted & 2):
                return False
        return True if (first, last) == (0, 0xFFFF) and not inverted & 1 else None


_NEW, _INVALID, _DST_NAT = 8, 1, 32
"""NF_CT_STATE_BIT of a new connection, NF_CT_STATE_INVALID_BIT, IPS_DST_NAT."""
_XT_STATE, _XT_STATUS, _XT_DNAT = 1, 64, 128
"""XT_CONNTRACK_STATE, XT_CONNTRACK_STATUS, XT_CONNTRACK_STATE_DNAT."""
_RTN_UNICAST, _RTN_LOCAL = 1, 2
_SYN = 2

_WITHOUT_EFFECT = frozenset(
    {"log", "last", "notrack", "dynset", "flow_offload", "dup", "nat", "masq", "redir"})
"""Expressions that neither match nor end the packet."""

_STEPS: dict[str, Callable[[_Run, Attributes], None]] = {
    "payload": _Run._payload, "meta": _Run._meta, "ct": _Run._ct, "fib": _Run._fib,
    "immediate": _Run._immediate, "bitwise": _Run._bitwise, "byteorder": _Run._byteorder, "cmp": _Run._cmp,
    "range": _Run._range, "lookup": _Run._lookup, "counter": _Run._counter, "reject": _Run._reject,
    "queue": _Run._queue, "objref": _Run._object, "match": _Run._match, "target": _Run._target,
    **dict.fromkeys(("exthdr", "rt", "socket", "numgen", "hash", "tunnel", "xfrm"), _Run._nothing_known),
}  # fmt: skip

_MATCHES: dict[str, Callable[[_Run, int, bytes], bool | None]] = {
    "comment": lambda run, revision, info: True,
    "conntrack": _Run._xt_conntrack, "addrtype": _Run._xt_addrtype, "mark": _Run._xt_mark,
    "rpfilter": _Run._xt_rpfilter, "tcp": _Run._xt_tcp, "udp": _Run._xt_udp,
    "rt": lambda run, revision, info: False,  # First packets have no routing header.
}  # fmt: skip

_COMPARED: dict[int, Callable[[bytes, bytes], bool]] = {
    0: bytes.__eq__, 1: bytes.__ne__, 2: bytes.__lt__, 3: bytes.__le__, 4: bytes.__gt__, 5: bytes.__ge__,
}


_REGISTERS = 80
"""Bytes of all registers (NFT_REG_MAX)."""


def _word(register: bytes, size: int) -> int:
    """Return the word where a register of *size* begins: 1 to 4 have 16 bytes, those from 8 on four."""
    number = _u32(register)
    if size > _REGISTERS:
        raise ValueError(f"no register has {size} bytes")
    return number - 8 if number >= 8 else (number - 1) * 4


def _name(interface: Interface) -> bytes:
    return interface.name.encode().ljust(16, b"\0")[:16]


def _port(port: int | None) -> bytes | None:
    return None if port is None else port.to_bytes(2, "big")


_Bytes = list[int | None]


def _bytes(value: bytes | None, size: int) -> _Bytes:
    return list(value) if value is not None else [None] * size


def _network_header(packet: FilteredPacket) -> _Bytes:
    size = packet.family.size
    source, destination = _bytes(packet.source, size), _bytes(packet.destination, size)
    if packet.family is Family.IPV4:
        return [0x45, *[None] * 8, packet.protocol, None, None, *source, *destination]
    return [*[None] * 6, packet.protocol, None, *source, *destination]


def _transport_header(packet: FilteredPacket) -> _Bytes:
    flags: _Bytes = [*[None] * 9, _SYN] if packet.protocol is net.Protocol.TCP else [None] * 4
    return [None, None, *_bytes(_port(packet.port), 2), *flags]

