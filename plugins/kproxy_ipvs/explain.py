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
from kproxy_core.nft.expressions import Branch
from kproxy_core.nft.interpret import is_translated
from kproxy_core.nft.packet import Number, Status, translated
from kproxy_core.nft.packet import Packet as Headers
from kproxy_core.nft.packet import Translation as NatTranslation
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
from kproxy_xtables.walk import Ruleset, Walk, network

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
    walk = Walk(rules, question, bound=state.local)
    fate, remembered = _follow(question.packet, walk, state)
    return KernelSide(
        tuple(walk.objects), fate if walk.is_certain else None, remembered, _deviation(question, state),
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
        super().__init__(state.rules, (MANGLE, NAT, FILTER))
        self._state = state
        self._kinds = {kind.full_name(family): kind for kind in SETS}

    def in_ipset(self, name: str, sides: Sequence[str], packet: Headers) -> int | None:
        kind = self._kinds.get(name)
        entries = self._state.sets.get(kind, {}) if kind is not None else {}
        source, destination, _, port = packet.flow
        if kind is None or not entries or source is None or destination is None:
            return None
        address = format_address(source if sides[0] == "src" else destination)
        if kind.type == "bitmap:port":
            return entries.get(str(port))
        if kind.type == "hash:ip":
            return entries.get(address)
        entry = f"{address},{Protocol(packet.protocol).name.lower()}:{port}"
        if kind.type == "hash:ip,port":
            return entries.get(entry)
        if kind.type == "hash:ip,port,ip":
            return entries.get(f"{entry},{format_address(source)}")
        sources = (text.rpartition(",")[2] for text in entries if text.startswith(f"{entry},"))
        return 0 if any(source in network(text) for text in sources) else None


def _follow(packet: Packet, walk: Walk, state: State) -> tuple[Fate | None, Destination | None]:
    """Return the fate of *packet* and its remembered endpoint. No rule of this mode chooses at random."""
    outgoing, to_node = packet.origin is Origin.NODE, walk.is_local(packet.destination)
    start = walk.start()
    if outgoing and to_node:  # The kernel chooses the local address that is dialled as source.
        start = _sent_by_itself(start)
    branches = walk.hook("output" if outgoing else "prerouting", [start])
    if not branches:
        return walk.ended, None
    key, servers = _server(packet, branches[0].seen.mark, state)
    if not outgoing or (to_node and servers is None):
        branches = walk.hook("input" if to_node else "forward", branches)
    if not branches:
        return walk.ended, None
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
        sent = [_sent_to(where, branch) for branch in branches]
        if outgoing or not walk.is_local(where.address):
            sent = walk.hook("postrouting", sent)
        masqueraded = any(is_translated(each.seen, Status.SRC_NAT) for each in sent)
        choices.append(EndpointShare(where, weight / total, masqueraded))
    remembered = state.remembered(key, packet.source)
    # net.ipv4.vs.expire_quiescent_template, which this mode and kube-proxy set, makes IPVS forget the others.
    return Fate(Outcome.FORWARDED, f"virtual server {key}", tuple(choices)), (
        remembered if remembered in usable else None)


def _sent_by_itself(branch: Branch) -> Branch:
    """Return a packet of the node with its destination as source."""
    packet = branch.seen.packet
    flow = packet.flow._replace(source=packet.flow.destination)
    return branch.of(branch.seen._replace(packet=packet.with_flow(flow)))


def _sent_to(where: Destination, branch: Branch) -> Branch:
    """Return a packet as a virtual server translates it."""
    translation = NatTranslation(False, where.address, where.address, (where.port, where.port))
    seen, connection = branch.seen, branch.seen.connection
    if connection is not None:  # It takes packets before nat's chain INPUT.
        seen = seen._replace(connection=connection._replace(status=connection.status & ~Status.SRC_NAT_DONE))
    ((seen, _),) = translated(seen, translation, None)
    return branch.of(seen)


def _server(packet: Packet, mark: Number, state: State) -> tuple[ServerKey, Weights | None]:
    """Return the virtual server of a packet: IPVS looks up marks before addresses."""
    if mark and isinstance(mark, int):
        key = ServerKey.marked(packet.family, mark)
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
