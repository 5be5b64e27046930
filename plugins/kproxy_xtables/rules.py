"""Chains and jumps as values, and the rules that several modes share. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.model.address import Family
from kproxy_core.model.node import LocalSource, NodeView

ChainKey = tuple[str, str]
"""Table and chain."""

RulesByChain = Mapping[ChainKey, Sequence[str]]
"""Rules as iptables-save prints them, without ``-A CHAIN``."""

BUILT_IN_CHAINS = frozenset({"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"})

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
