"""Which iptables this node uses: the programs of nf_tables or those of the legacy interface.

Two sets of rules in one kernel contradict each other without a word, so everybody on a node
must use the same one. The evidence is weighed as the iptables-wrappers of Kubernetes do
(kubernetes-sigs/iptables-wrappers): kubelet's own chains first, then who has more rules.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

KUBELET_CHAINS = (":KUBE-IPTABLES-HINT ", ":KUBE-KUBELET-CANARY ")
"""What kubelet creates in mangle for others to find (KEP-3178)."""

OLDEST = (1, 6, 2)
"""The first version with ``--random-fully`` and with ``-w`` for iptables-restore."""

Version = tuple[int, ...]


class Variant(NamedTuple):
    """One set of programs."""

    nft: bool
    """Over nf_tables; else the legacy interface, whose tables are replaced as a whole."""
    infix: str
    """What its programs have in their names: ``-nft``, ``-legacy``, or "" for the only or default ones."""
    version: Version

    def program(self, base: str, action: str = "") -> str:
        """The name of a program; *base*: ``iptables`` or ``ip6tables``, *action*: ``save`` or ``restore``."""
        return f"{base}{self.infix}-{action}" if action else f"{base}{self.infix}"

    def __str__(self) -> str:
        return f"iptables {'.'.join(map(str, self.version))} ({'nf_tables' if self.nft else 'legacy'})"


def prefers_nft(save: Callable[[str, str], Iterable[str]], default_is_nft: bool) -> bool:
    """Decide between two installed variants.

    *save* returns what a variant's programs save of both families: its arguments are ``nft``
    or ``legacy``, and a table ("": all that exist; naming a legacy table would create it).
    *default_is_nft* decides where nothing is found: what plain ``iptables`` is.
    """
    if _has_kubelet_chains(save("nft", "mangle")):
        return True
    legacy = list(save("legacy", ""))
    if _has_kubelet_chains(legacy):
        return False
    legacy_rules, nft_rules = _count_rules(legacy), _count_rules(save("nft", ""))
    if legacy_rules == nft_rules == 0:
        return default_is_nft
    return legacy_rules <= nft_rules


def _has_kubelet_chains(lines: Iterable[str]) -> bool:
    return any(line.startswith(KUBELET_CHAINS) for line in lines)


def _count_rules(lines: Iterable[str]) -> int:
    return sum(line.startswith("-") for line in lines)
