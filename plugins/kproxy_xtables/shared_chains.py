"""Chains that kube-proxy has under one name in two of its modes, and whose they are at the moment.

One mode leads each frontend to chains of its own, the other finds frontends in ipsets. A change of mode
takes the chains over and removes nothing of the rest (kube-proxy 1.36).
"""

from collections.abc import Iterable

from kproxy_xtables.removal import ChainKey, Held, jump

SERVICES = ("nat", "KUBE-SERVICES")
FIREWALL = ("filter", "KUBE-PROXY-FIREWALL")

_FOLLOW_SERVICES = frozenset({
    SERVICES, ("nat", "KUBE-POSTROUTING"), ("nat", "KUBE-MARK-MASQ"), ("filter", "KUBE-FORWARD"),
})  # fmt: skip
_IPSET_MODES_OWN = frozenset({("filter", "KUBE-NODE-PORT"), ("filter", "KUBE-IPVS-FILTER")})
_IPSET_FIREWALL = "kube-proxy firewall rules"
"""The comment of jumps to the firewall in the mode with ipsets; in the other it is another one."""


def of_ipset_mode(held: Held) -> frozenset[ChainKey]:
    """Those that belong to the mode with ipsets. The others belong to the other mode."""
    found: frozenset[ChainKey] = frozenset()
    if _finds_in_ipsets(held[SERVICES]) if SERVICES in held else not _IPSET_MODES_OWN.isdisjoint(held):
        found |= _FOLLOW_SERVICES
    if rules := held.get(FIREWALL, ()):
        return found | {FIREWALL} if _finds_in_ipsets(rules) else found
    jumps = [
        is_ipset_jump(rule)
        for (table, _), rules in held.items() if table == FIREWALL[0]
        for rule in rules if (leads := jump(rule)) and leads.target == FIREWALL[1]
    ]  # fmt: skip
    return found | {FIREWALL} if jumps and all(jumps) else found


def is_ipset_jump(rule: str) -> bool:
    """Whether a jump to the firewall is that of the mode with ipsets."""
    found = jump(rule)
    return found is not None and found.comment == _IPSET_FIREWALL


def _finds_in_ipsets(rules: Iterable[str]) -> bool:
    return any("--match-set KUBE-" in rule or rule.endswith("-j KUBE-NODE-PORT") for rule in rules)
