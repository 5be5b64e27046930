"""Serves the hook `kproxy_explain`: the rules, sets and virtual servers that packets meet."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.backend.api import KernelSide, Question
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.fate import Choice, Fate, Origin, Outcome, Packet
from kproxy_core.plan.service_plan import Frontend
from kproxy_ipvs.applied import Applied
from kproxy_ipvs.kernel import device, listing, sets
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import FILTER, MANGLE, NAT, SETS, SetKind
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.skeleton import JUMPS, skeleton
from kproxy_ipvs.wanted import ServerKey, make_style
from kproxy_xtables.rules import RulesByChain, jumps_by_chain
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant
from kproxy_xtables.walk import Flight, Ruleset, Walk, network

Weights = Mapping[Destination, int]


class State(NamedTuple):
    """All kernel objects of one family."""

    rules: RulesByChain
    sets: Mapping[SetKind, Mapping[str, int]]
    find: Callable[[ServerKey], Weights | None]
    """Returns the real servers of a virtual server; None if that does not exist."""
    remembered: Callable[[ServerKey, Address], Destination | None]
    """Returns the real server to which persistence has pinned a client."""
    local: frozenset[Address]
    """The addresses of the device."""


def explain(questions: Sequence[Question], settings: Settings, *, live: bool) -> list[KernelSide]:
    """Return the way of each packet. Raises HostError."""
    if not live:
        return [_side(question, _written(question, settings)) for question in questions]
    family = questions[0].node.family
    with VirtualServers() as servers:

        def find(key: ServerKey) -> Weights | None:
            items = servers.destinations(key) if servers.exists(key) else None
            return None if items is None else {item.where: item.weight for item in items}

        rules = Tables(family, find_variant()).chains()
        state = State(rules, sets.read(family), find, _remembered, device.read(family)[0])
        return [_side(question, state) for question in questions]


def frontends(family: Family) -> list[Frontend]:
    """Return the addresses of the kernel's virtual servers. Raises HostError."""
    with VirtualServers() as servers:
        return [
            Frontend(key.address, Protocol(key.protocol), key.port)
            for key in servers.keys(family) if key.address is not None
        ]


def _side(question: Question, state: State) -> KernelSide:
    walk = Walk(_Rules(question.node.family, state), question.node, state.local)
    fate, remembered = _follow(question.packet, walk, state)
    deviation = "" if question.plan else "IPVS refuses packets to addresses of Services only"
    return KernelSide(tuple(walk.objects), None if walk.strange else fate, remembered, deviation)


class _Rules(Ruleset):
    def __init__(self, family: Family, state: State) -> None:
        super().__init__(state.rules)
        self._state = state
        self._kinds = {kind.full_name(family): kind for kind in SETS}

    def in_set(self, name: str, sides: Sequence[str], packet: Flight) -> int | None:
        kind = self._kinds.get(name)
        entries = self._state.sets.get(kind, {}) if kind is not None else {}
        if kind is None or not entries:
            return None
        source = packet.packet.source
        if kind.type == "bitmap:port":
            return entries.get(str(packet.port))
        if kind.type == "hash:ip":
            return entries.get(format_address(source if sides[0] == "src" else packet.destination))
        entry = f"{format_address(packet.destination)},{packet.packet.protocol.name.lower()}:{packet.port}"
        if kind.type == "hash:ip,port":
            return entries.get(entry)
        if kind.type == "hash:ip,port,ip":
            return entries.get(f"{entry},{format_address(source)}")
        sources = (text.rpartition(",")[2] for text in entries if text.startswith(f"{entry},"))
        return 0 if any(source in network(text) for text in sources) else None


def _follow(packet: Packet, walk: Walk, state: State) -> tuple[Fate, Destination | None]:
    """Return the fate of *packet* and its remembered endpoint. No rule of this mode chooses at random."""
    outgoing = packet.origin is Origin.NODE
    hook = "OUTPUT" if outgoing else "PREROUTING"
    flight = Flight.of(packet)
    for table in (MANGLE, NAT):
        (end,) = walk.through(table, hook, flight)
        if end.outcome is not None:
            return Fate(end.outcome, walk.reason), None
        flight = end.flight
    key, servers = _server(packet, flight, state)
    if not outgoing or servers is None:
        hook = "INPUT" if walk.is_local(packet.destination) else "FORWARD"
        (end,) = walk.through(FILTER, hook, flight)
        if end.outcome is not None:
            return Fate(end.outcome, walk.reason), None
    if servers is None:
        return Fate(Outcome.UNTOUCHED, "no virtual server"), None
    walk.note("virtual server", str(key))
    usable = {where: weight for where, weight in servers.items() if weight}
    for where, weight in servers.items():
        walk.note("real server", f"{format_socket(*where)} weight {weight}")
    if not usable:
        return Fate(Outcome.REFUSED, f"virtual server {key} has no real server that takes connections"), None
    total = sum(usable.values())
    choices = []
    for where, weight in usable.items():
        translated = Flight(packet, where.address, where.port, flight.mark, translated=True)
        (end,) = walk.through(NAT, "POSTROUTING", translated)
        choices.append(Choice(where, weight / total, end.flight.masqueraded))
    return Fate(Outcome.FORWARDED, f"virtual server {key}", tuple(choices)), state.remembered(
        key, packet.source)


def _server(packet: Packet, flight: Flight, state: State) -> tuple[ServerKey, Weights | None]:
    """Return the virtual server of a packet: IPVS looks up marks before addresses."""
    if flight.mark:
        key = ServerKey.marked(packet.family, flight.mark)
        servers = state.find(key)
        if servers is not None:
            return key, servers
    key = ServerKey(packet.family, 0, packet.destination, packet.protocol, packet.port)
    return key, state.find(key)


def _remembered(key: ServerKey, client: Address) -> Destination | None:
    if key.address is None:
        return None
    try:
        return listing.read_template(client, Destination(key.address, key.port))
    except HostError:
        return None


def _written(question: Question, settings: Settings) -> State:
    """Return the objects that a sync would write for one plan, or none."""
    node, plan = question.node, question.plan
    applied = Applied.after({plan.key: plan} if plan else {}, make_style(node, settings.scheduler))
    servers = applied.servers

    def find(key: ServerKey) -> Weights | None:
        return dict.fromkeys(servers[key].destinations, 1) if key in servers else None

    rules = skeleton(node) | jumps_by_chain(JUMPS)
    entries: dict[SetKind, dict[str, int]] = {}
    for element in applied.elements:
        entries.setdefault(element.set, {})[element.entry] = element.mark
    return State(rules, entries, find, lambda *_: None, frozenset(applied.addresses))
