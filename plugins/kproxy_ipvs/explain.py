"""Explanation of packets: the rules, sets and virtual servers that they meet."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.contract import (
    Address,
    Destination,
    EndpointShare,
    Family,
    Fate,
    Frontend,
    FrontendKind,
    KernelSide,
    Origin,
    Outcome,
    Packet,
    Protocol,
    Question,
    Translation,
    format_address,
    format_socket,
    kind_of,
)
from kproxy_ipvs.applied import Applied
from kproxy_ipvs.kernel import connections, device, sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import FILTER, IPVS_ACCESS, MANGLE, NAT, SETS, SetKind
from kproxy_ipvs.settings import Settings
from kproxy_ipvs.skeleton import JUMPS, skeleton
from kproxy_ipvs.wanted import ServerKey, make_style
from kproxy_xtables.rules import RulesByChain, jumps_by_chain
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant
from kproxy_xtables.walk import Ruleset, Skb, Walk, network

Weights = Mapping[Destination, int]


class State(NamedTuple):
    rules: RulesByChain
    sets: Mapping[SetKind, Mapping[str, int]]
    find: Callable[[ServerKey], Weights | None]
    """Returns the real servers of a virtual server; None if that does not exist."""
    remembered: Callable[[ServerKey, Address], Destination | None]
    """Returns the real server to which persistence has pinned a client."""
    local: frozenset[Address]
    """The addresses of the device."""


def explain(questions: Sequence[Question], settings: Settings, *, live: bool) -> list[KernelSide]:
    """Return the path of each packet. Raises HostError."""
    if not live:
        return [side_of(question, _written(question, settings)) for question in questions]
    family = questions[0].node.family
    with VirtualServers() as servers:
        existing = servers.schedulings(family)

        def find(key: ServerKey) -> Weights | None:
            if key not in existing:
                return None
            return {item.where: item.weight for item in servers.destinations(key)}

        rules = Tables(family, find_variant()).chains()
        state = State(rules, sets.read(family), find, connections.read_template, device.read(family)[0])
        return [side_of(question, state) for question in questions]


def frontends(family: Family) -> list[Frontend]:
    """Return the addresses of the kernel's virtual servers. Raises HostError."""
    with VirtualServers() as servers:
        return [
            Frontend(key.address, Protocol(key.protocol), key.port)
            for key in servers.schedulings(family) if key.address is not None
        ]


def side_of(question: Question, state: State) -> KernelSide:
    rules = _Rules(question.node.family, state)
    walk = Walk(rules, question.node, question.addresses, bound=state.local)
    fate, remembered = _follow(question.packet, walk, state)
    return KernelSide(
        tuple(walk.objects), None if walk.strange else fate, remembered, _deviation(question, state),
        Translation.VIRTUAL_SERVER)


def _deviation(question: Question, state: State) -> str:
    """Return the deviation by design of IPVS, or of kube-proxy's use of it, for such a packet."""
    plan, frontend = question.plan, question.frontend
    if plan is None or frontend is None:
        return "IPVS refuses packets to addresses of Services only"
    is_local = plan.internal_policy_local if kind_of(frontend, plan) is FrontendKind.CLUSTER_IP else (
        plan.external_policy_local)
    if is_local and (MANGLE, IPVS_ACCESS) not in state.rules:
        return ("kube-proxy's ipvs mode knows no short circuit, and ignores policy Local where this node has "
                "no endpoint")
    return ""


class _Rules(Ruleset):
    def __init__(self, family: Family, state: State) -> None:
        super().__init__(state.rules)
        self._state = state
        self._kinds = {kind.full_name(family): kind for kind in SETS}

    def in_set(self, name: str, sides: Sequence[str], packet: Skb) -> int | None:
        kind = self._kinds.get(name)
        entries = self._state.sets.get(kind, {}) if kind is not None else {}
        if kind is None or not entries:
            return None
        source = packet.packet.source
        address = format_address(source if sides[0] == "src" else packet.destination)
        if kind.type == "bitmap:port":
            return entries.get(str(packet.port))
        if kind.type == "hash:ip":
            return entries.get(address)
        entry = f"{address},{packet.packet.protocol.name.lower()}:{packet.port}"
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
    skb = Skb.of(packet)
    for table in (MANGLE, NAT):
        (end,) = walk.through(table, hook, skb)
        if end.outcome is not None:
            return Fate(end.outcome, walk.reason), None
        skb = end.skb
    key, servers = _server(packet, skb, state)
    to_node = walk.is_local(packet.destination)
    if outgoing and to_node:  # The kernel chooses the local address that is dialled as source.
        skb = skb._replace(packet=packet._replace(source=packet.destination))
    hooks = ["OUTPUT"] if outgoing else ["INPUT" if to_node else "FORWARD"]
    for hook in [*hooks, "INPUT"] if outgoing and to_node and servers is None else hooks:
        (end,) = walk.through(FILTER, hook, skb)
        if end.outcome is not None:
            return Fate(end.outcome, walk.reason), None
    if servers is None:
        return Fate(Outcome.UNTOUCHED, "no virtual server"), None
    if not (outgoing or to_node):
        address = format_address(packet.destination)
        return Fate(Outcome.UNTOUCHED, f"no interface of this node has {address}"), None
    walk.note("virtual server", str(key))
    usable = {where: weight for where, weight in servers.items() if weight}
    for where, weight in servers.items():
        walk.note("real server", f"{format_socket(*where)} weight {weight}")
    if not usable:
        return Fate(Outcome.REFUSED, f"virtual server {key} has no real server that takes connections"), None
    total = sum(usable.values())
    choices = []
    for where, weight in usable.items():
        translated = Skb(skb.packet, where.address, where.port, skb.mark, translated=True)
        if outgoing or not walk.is_local(where.address):
            (end,) = walk.through(NAT, "POSTROUTING", translated)
            translated = end.skb
        choices.append(EndpointShare(where, weight / total, translated.masqueraded))
    remembered = state.remembered(key, packet.source)
    # net.ipv4.vs.expire_quiescent_template, which this mode and kube-proxy set, makes IPVS forget the others.
    return Fate(Outcome.FORWARDED, f"virtual server {key}", tuple(choices)), (
        remembered if remembered in usable else None)


def _server(packet: Packet, skb: Skb, state: State) -> tuple[ServerKey, Weights | None]:
    """Return the virtual server of a packet: IPVS looks up marks before addresses."""
    if skb.mark:
        key = ServerKey.marked(packet.family, skb.mark)
        servers = state.find(key)
        if servers is not None:
            return key, servers
    key = ServerKey(packet.family, 0, packet.destination, packet.protocol, packet.port)
    return key, state.find(key)


def _written(question: Question, settings: Settings) -> State:
    """Return the objects that a sync would write for one plan, or none."""
    node, plan = question.node, question.plan
    applied = Applied.after({plan.key: plan} if plan else {}, make_style(node, settings.scheduler))
    servers = applied.servers

    def find(key: ServerKey) -> Weights | None:
        return servers[key].real_servers if key in servers else None

    rules = skeleton(node) | jumps_by_chain(JUMPS)
    entries: dict[SetKind, dict[str, int]] = {}
    for element in applied.elements:
        entries.setdefault(element.set, {})[element.entry] = element.mark
    return State(rules, entries, find, lambda *_: None, frozenset(applied.addresses))
