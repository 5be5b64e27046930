"""Chains that two modes of kube-proxy have under the same name, and their current owner. Pure.

The iptables mode sends each frontend to chains of its own, the ipvs mode looks frontends up in ipsets. After
a change of mode kube-proxy reuses these chains, and removes nothing else (kube-proxy 1.36).
"""

from collections.abc import Iterable

from kproxy_xtables.rules import ChainKey, RulesByChain, parse_jump

SERVICES = ("nat", "KUBE-SERVICES")
FIREWALL = ("filter", "KUBE-PROXY-FIREWALL")

_FOLLOW_SERVICES = frozenset({
    SERVICES, ("nat", "KUBE-POSTROUTING"), ("nat", "KUBE-MARK-MASQ"), ("filter", "KUBE-FORWARD"),
})  # fmt: skip
_ONLY_WITH_IPSETS = frozenset({("filter", "KUBE-NODE-PORT"), ("filter", "KUBE-IPVS-FILTER")})
_IPSET_FIREWALL = "kube-proxy firewall rules"
"""Comment of the jumps to the firewall in the mode with ipsets; the other mode has another comment."""


def ipset_mode_chains(held: RulesByChain) -> frozenset[ChainKey]:
    """Return the shared chains that belong to the mode with ipsets. The other mode owns the rest."""
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
