"""Removing every trace of the mode: our chains and rules, and kube-proxy's of all versions."""

from collections.abc import Iterable

from kproxy_core.backend.api import Leftovers
from kproxy_core.host.iptables_cleanup import clean, unused_variants
from kproxy_core.host.iptables_removal import ChainKey, Held, Removal, jump, plan_removal
from kproxy_core.host.iptables_shared import FIREWALL, is_ipset_jump, of_ipset_mode
from kproxy_core.host.iptables_variant import Variant, find_variants
from kproxy_iptables import names
from kproxy_iptables.names import NAT

_OLDER = frozenset({(NAT, "KUBE-MARK-DROP")})
"""Up to kube-proxy 1.27; kubelet's, too, which makes it again."""

_IPVS_CHAINS = frozenset({(NAT, "KUBE-LOAD-BALANCER"), (NAT, "KUBE-NODE-PORT"), (NAT, "KUBE-FIRE-WALL")})
"""Chains of kube-proxy's ipvs mode that lead to shared ones."""

_SNAT_COMMENT = '"kubernetes service traffic requiring SNAT"'
"""Of a rule that stood in POSTROUTING itself before there was a chain for it."""


def cleanup(*, dry_run: bool) -> Leftovers:
    """Remove what is there from both interfaces of the kernel, nf_tables and legacy, and both families."""
    return _clean(find_variants(), dry_run=dry_run)


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove what is there from the interface that this node does not use."""
    return _clean(unused_variants(), dry_run=dry_run)


def _clean(variants: Iterable[Variant], *, dry_run: bool) -> Leftovers:
    cleaned = clean(what_to_remove, variants, dry_run=dry_run, counted=names.SERVICE_PREFIXES)
    return Leftovers("iptables", tuple(cleaned.removed), tuple(cleaned.errors))


def what_to_remove(held: Held) -> Removal:
    """Decide what of *held* is this mode's."""
    ours = {key for key in held if names.is_ours(*key) or key in _OLDER} - of_ipset_mode(held)

    def is_own(key: ChainKey, rule: str) -> bool:
        found = jump(rule)
        if found is None:
            return rule.endswith("-j MASQUERADE") and _SNAT_COMMENT in rule
        target = (key[0], found.target)
        wanted = target in ours or (target == FIREWALL and not is_ipset_jump(rule))
        return wanted and found.comment.startswith("kube")

    return plan_removal(held, ours, is_own, _IPVS_CHAINS.__contains__)
