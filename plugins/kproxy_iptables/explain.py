"""Explanation of packets: the rules that they meet."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from kproxy_core.contract import (
    Address,
    Destination,
    EndpointShare,
    Fate,
    Frontend,
    FrontendKind,
    KernelSide,
    Origin,
    Outcome,
    Protocol,
    Question,
    is_loopback,
    kind_of,
    parse_address,
)
from kproxy_core.linux.rulesets import is_recent
from kproxy_core.nft.interpret import is_translated
from kproxy_core.nft.packet import Status
from kproxy_iptables.names import EXTERNAL_SERVICES, FILTER, NAT, NODE_PORTS, SERVICES
from kproxy_iptables.settings import Settings
from kproxy_iptables.skeleton import JUMPS, Facts, serves_loopback, skeleton
from kproxy_iptables.wanted import make_style, wanted
from kproxy_xtables import tables as over_netlink
from kproxy_xtables.rules import ChainKey, RulesByChain, jumps_by_chain
from kproxy_xtables.tables import Tables, Unusable
from kproxy_xtables.walk import Ruleset, Walk

_FEW = 12
"""Limit for the packets for which single chains are read."""
_MOST_READ = 60
"""Limit for the chains read one by one: a call takes 4 ms, all chains of 10,000 Services take a second."""


def explain(questions: Sequence[Question], settings: Settings, tables: Tables | None) -> list[KernelSide]:
    """Return the path of each packet in *tables*; None: as a sync would write them. Raises HostError."""
    if tables is None:
        return [_side(question, _Rules(_written(question, settings))) for question in questions]
    if len(questions) <= _FEW and _has_many_chains(tables):
        ruleset: Ruleset = _OnDemand(
            tables, (key for question in questions for key in _written(question, settings)))
    else:
        ruleset = _Rules(tables.chains(), for_many=True)
    return [_side(question, ruleset) for question in questions]


def _has_many_chains(tables: Tables) -> bool:
    """Return whether reading single chains is faster. A legacy program always reads a whole table."""
    return tables.variant.nft and over_netlink.count_chains(tables.family, NAT) > _MOST_READ


_DIALLED = re.compile(r"(?:.*-d (\S+)/\d+ )?.*-p (tcp|udp|sctp) .*--dport (\d+) -[jg] (\S+)")
_OF_SERVICES = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "REJECT", "DROP")


def frontends(tables: Tables) -> list[Frontend]:
    """Return the frontends that rules in the kernel match. Raises HostError."""
    # A legacy program reads a table as a whole.
    ruleset = _OnDemand(tables) if tables.variant.nft else Ruleset(tables.chains())
    places = ((NAT, SERVICES), (NAT, NODE_PORTS), (FILTER, SERVICES), (FILTER, EXTERNAL_SERVICES))
    found: dict[Frontend, None] = {}
    for rule in (rule for place in places for rule in ruleset.texts(*place)):
        match = _DIALLED.match(rule)
        if match and match[4].startswith(_OF_SERVICES):
            address = parse_address(match[1]) if match[1] else None
            if address is None or not is_loopback(address):
                found[Frontend(address, Protocol[match[2].upper()], int(match[3]))] = None
    return list(found)


class _Rules(Ruleset):
    """Chains, and the kernel's lists of recent clients."""

    def is_recent(self, name: str, source: Address) -> bool:
        return bool(is_recent(name, source))


class _OnDemand(_Rules):
    """Chains that are read when a packet meets them. Beyond a limit, all are read at once."""

    def __init__(self, tables: Tables, ahead: Iterable[ChainKey] = ()) -> None:
        """Read the chains *ahead*, and at the same time the longest one, which takes as long as 30 others."""
        from concurrent.futures import ThreadPoolExecutor

        super().__init__({})
        self._tables = tables
        self._read: dict[ChainKey, Sequence[str]] = {}
        self._all: RulesByChain | None = None
        wanted = list(dict.fromkeys([(NAT, SERVICES), *ahead]))
        if len(wanted) <= _MOST_READ:
            with ThreadPoolExecutor(2) as pool:
                self._read = dict(zip(wanted, pool.map(lambda key: self._one(*key), wanted), strict=True))

    def texts(self, table: str, chain: str) -> Sequence[str]:
        if self._all is None and len(self._read) >= _MOST_READ and (table, chain) not in self._read:
            self._all = self._tables.chains()
        if self._all is not None:
            return self._all.get((table, chain), ())
        if (table, chain) not in self._read:
            self._read[table, chain] = self._one(table, chain)
        return self._read[table, chain]

    def _one(self, table: str, chain: str) -> Sequence[str]:
        try:
            return self._tables.rules(table, chain)
        except Unusable as error:
            if error.is_denied:
                raise
            return ()  # It does not exist.


def _written(question: Question, settings: Settings) -> dict[ChainKey, list[str]]:
    """Return the rules that a sync would write for one plan, or none."""
    node, plan = question.node, question.plan
    facts = Facts(localhost_node_ports=serves_loopback(node, enabled=settings.localhost_node_ports))
    found = defaultdict(list, jumps_by_chain(JUMPS))
    if plan is not None:
        own = wanted(plan, make_style(node, facts, len(plan.reachable)))
        for chain, text in own.chains.items():
            found[NAT, chain] = [line.removeprefix(f"-A {chain} ") for line in text.splitlines()]
        for rule in own.rules:
            found[rule.table, rule.chain].append(rule.spec)
    for key, rules in skeleton(node, facts).items():
        found[key] += rules
    return found


def _side(question: Question, ruleset: Ruleset) -> KernelSide:
    walk = Walk(ruleset, question)
    fate = follow(walk)
    remembered = None
    if walk.lists:  # The shares are those of new clients.
        choices = follow(Walk(ruleset, question, is_pinned=True)).choices
        remembered = choices[0].where if choices else None
    return KernelSide(
        tuple(walk.objects), fate if walk.is_certain else None, remembered, _deviation(question))


def follow(walk: Walk) -> Fate:
    """Return the fate of a packet that the nat table may translate."""
    choices: dict[Destination, EndpointShare] = {}
    passed = walk.enter(walk.start())
    ended = walk.ended
    for branch in passed:
        rest = walk.rest(branch)
        ended = ended or rest.ended
        address, port = branch.seen.packet.flow.destination, branch.seen.packet.flow.port
        if not is_translated(branch.seen) or address is None or port is None:
            continue
        where = Destination(address, port)
        for end in rest.ends:
            if end.place is None:
                share = end.share * branch.chance.share + (choices[where].share if where in choices else 0.0)
                choices[where] = EndpointShare(where, share, is_translated(end.seen, Status.SRC_NAT))
    if choices:
        return Fate(Outcome.FORWARDED, walk.reason, tuple(choices.values()))
    return ended or Fate(Outcome.UNTOUCHED, "no rule applies")


def _deviation(question: Question) -> str:
    """Return the deviation by design for such a packet, which kube-proxy's mode shares."""
    plan, frontend = question.plan, question.frontend
    if plan is None or frontend is None:
        return "kube-proxy's iptables rules do not refuse packets to other ports and addresses of ClusterIPs"
    kind = kind_of(frontend, plan)
    if plan.has_endpoints or kind is FrontendKind.CLUSTER_IP:
        return ""
    if question.packet.origin is Origin.NODE and kind is not FrontendKind.NODE_PORT:
        return "kube-proxy's iptables rules do not refuse the node's own packets to external frontends"
    if kind is FrontendKind.LOAD_BALANCER_IP and plan.source_ranges:
        return "kube-proxy's iptables rules do not check source ranges without endpoints"
    return ""
