"""Chains, jumps and rules of iptables as values, and rules that several modes share. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.contract import Family, LocalSource, NodeView

ChainKey = tuple[str, str]
"""Table and chain."""

RulesByChain = Mapping[ChainKey, Sequence[str]]
"""Rules as iptables-save prints them, without ``-A CHAIN``."""

BUILT_IN_CHAINS = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})

MANY_DELETIONS = 100
"""Deletions from one chain beyond which it is replaced: iptables compares each with all rules before it."""

NEW_CONNECTIONS = "-m conntrack --ctstate NEW"
TO_THIS_NODE = "-m addrtype --dst-type LOCAL"
REJECT = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}

_MATCHES = rf"((?:(?:{NEW_CONNECTIONS}|-m state --state NEW|{TO_THIS_NODE}) )*)"
_JUMP = re.compile(rf'{_MATCHES}-m comment --comment "([^"]*)" {_MATCHES}-j (\S+)')


class Jump(NamedTuple):
    """A rule in a built-in chain that sends all packets, or all new connections, to another chain."""

    table: str
    chain: str
    target: str
    comment: str = ""
    match: str = ""
    at_end: bool = False
    """The rule belongs at the end of its chain, not at the top."""

    @property
    def spec(self) -> str:
        """The rule without ``-A CHAIN``."""
        comment = f'-m comment --comment "{self.comment}"' if self.comment else ""
        return " ".join(filter(None, (self.match, comment, f"-j {self.target}")))

    @property
    def command(self) -> str:
        """The iptables-restore line that adds the rule, without a line end."""
        return f"{'-A' if self.at_end else '-I'} {self.chain} {self.spec}"

    @property
    def target_key(self) -> ChainKey:
        return self.table, self.target


def append_commands(chain: str, rules: Iterable[str]) -> str:
    """Return the iptables-restore lines that add *rules* at the end of *chain*."""
    return "".join([f"-A {chain} {rule}\n" for rule in rules])


def parse_jump(key: ChainKey, rule: str) -> Jump | None:
    """Return a *rule* of the chain *key* as a jump; None if it matches more than a jump of any kube-proxy."""
    found = _JUMP.fullmatch(rule)
    return Jump(*key, found[4], found[2], (found[1] + found[3]).strip()) if found else None


def jumps_by_chain(jumps: Iterable[Jump]) -> dict[ChainKey, list[str]]:
    """Return the rules of built-in chains to which *jumps* were added in this order."""
    found: dict[ChainKey, list[str]] = {}
    for jump in jumps:
        place = found.setdefault((jump.table, jump.chain), [])
        place.insert(len(place) if jump.at_end else 0, jump.spec)
    return found


def missing_jumps(jumps: Iterable[Jump], held: RulesByChain) -> list[Jump]:
    return [jump for jump in jumps if not has_rule(held.get((jump.table, jump.chain), ()), jump.spec)]


def has_rule(rules: Sequence[str], spec: str) -> bool:
    """Return whether *spec* is one of *rules*, in any order of words: iptables versions differ in that."""
    return spec in rules or sorted(spec.split()) in (sorted(rule.split()) for rule in rules)


def mark_rules(node: NodeView) -> tuple[list[str], list[str], list[str]]:
    """Return the rules that mark packets, that accept marked ones, and that masquerade them."""
    bit = f"{1 << node.masquerade_bit:#x}"
    accept = [
        f'-m comment --comment "kubernetes forwarding rules" -m mark --mark {bit}/{bit} -j ACCEPT',
        '-m comment --comment "kubernetes forwarding conntrack rule"'
        " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    ]
    masquerade = [
        f"-m mark ! --mark {bit}/{bit} -j RETURN",
        # Cleared, so that a packet that passes here again is not masqueraded twice.
        f"-j MARK --set-xmark {bit}/0x0",
        '-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully',
    ]
    return [f"-j MARK --set-xmark {bit}/{bit}"], accept, masquerade


def from_pods(source: LocalSource, *, negate: bool = False) -> str:
    """Return the match for traffic from this node's pods, with a space after it."""
    no = "! " if negate else ""
    if source.cidr is not None:
        return f"{no}-s {source.cidr} "
    return f"{no}-i {source.interface or source.interface_prefix + '+'} "


# Output of iptables-save.

class SavedChain(NamedTuple):
    """A chain as iptables-save prints it."""

    table: str
    name: str
    lines: list[str]
    """Rules as ``-A`` commands with line ends."""

    @property
    def rules(self) -> list[str]:
        """The rules without ``-A CHAIN`` and line ends."""
        start = len("-A  ") + len(self.name)
        # libxt_nfacct prints one blank too many.
        return [line[start:-1].replace("--nfacct-name  ", "--nfacct-name ") for line in self.lines]


def read_saved(lines: Iterable[str]) -> Iterator[SavedChain]:
    """Yield the chains of each table: those with rules in their order, then the empty ones."""
    table = current = ""
    found: list[str] = []
    empty: dict[str, None] = {}
    for line in lines:
        if line.startswith("-A "):
            chain = line.split(None, 2)[1]  # A rule that only counts has nothing behind it.
            if chain != current:
                if found:
                    yield SavedChain(table, current, found)
                current, found = chain, []
                empty.pop(chain, None)
            found.append(line)
        elif line.startswith(":"):
            empty[line[1 : line.index(" ")]] = None
        elif line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith("COMMIT"):
            if found:
                yield SavedChain(table, current, found)
            for chain in empty:
                yield SavedChain(table, chain, [])
            current, found, empty = "", [], {}


# Ownership of chains that the iptables and the ipvs mode of kube-proxy have under the same name.

SERVICES = ("nat", "KUBE-SERVICES")
FIREWALL = ("filter", "KUBE-PROXY-FIREWALL")

_FOLLOW_SERVICES = frozenset({
    SERVICES, ("nat", "KUBE-POSTROUTING"), ("nat", "KUBE-MARK-MASQ"), ("filter", "KUBE-FORWARD"),
})  # fmt: skip
_ONLY_WITH_IPSETS = frozenset({("filter", "KUBE-NODE-PORT"), ("filter", "KUBE-IPVS-FILTER")})
_IPSET_FIREWALL = "kube-proxy firewall rules"
"""Comment of the jumps to the firewall in the mode with ipsets; the other mode has another comment."""


def ipset_mode_chains(held: RulesByChain) -> frozenset[ChainKey]:
    """Return the shared chains that belong to the mode with ipsets. The other mode owns the rest.

    The iptables mode sends each frontend to chains of its own, the ipvs mode looks frontends up in ipsets.
    After a change of mode kube-proxy 1.36 reuses these chains, and removes nothing else.
    """
    found: frozenset[ChainKey] = frozenset()
    if _reads_ipsets(held[SERVICES]) if SERVICES in held else not _ONLY_WITH_IPSETS.isdisjoint(held):
        found |= _FOLLOW_SERVICES
    if rules := held.get(FIREWALL, ()):
        return found | {FIREWALL} if _reads_ipsets(rules) else found
    jumps = [
        is_ipset_firewall_jump(key, rule)
        for key, rules in held.items() for rule in rules
        if (jump := parse_jump(key, rule)) and jump.target_key == FIREWALL
    ]  # fmt: skip
    return found | {FIREWALL} if jumps and all(jumps) else found


def is_ipset_firewall_jump(key: ChainKey, rule: str) -> bool:
    """Return whether a *rule* in the chain *key* is the jump to the firewall of the mode with ipsets."""
    jump = parse_jump(key, rule)
    return jump is not None and jump.target_key == FIREWALL and jump.comment == _IPSET_FIREWALL


def _reads_ipsets(rules: Iterable[str]) -> bool:
    return any("--match-set KUBE-" in rule or rule.endswith("-j KUBE-NODE-PORT") for rule in rules)
