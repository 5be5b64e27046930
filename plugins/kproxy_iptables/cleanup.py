"""Removal of every trace of the mode: its chains and rules, and those of all versions of kube-proxy."""

from collections.abc import Collection
from functools import partial

from kproxy_core.contract import Leftovers
from kproxy_iptables import names
from kproxy_iptables.names import NAT
from kproxy_iptables.skeleton import JUMPS
from kproxy_nft.table import clean_up_counts
from kproxy_xtables.cleanup import clean_up
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import (
    FIREWALL,
    ChainKey,
    RulesByChain,
    has_rule,
    ipset_mode_chains,
    is_ipset_firewall_jump,
    jumps_by_chain,
    parse_jump,
)
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_used_and_unused, find_variants

# Decisions about ownership. Pure.

OLDER_CHAINS = frozenset({(NAT, "KUBE-MARK-DROP")})
"""Chains of kube-proxy up to 1.27. Kubelet up to 1.27 has this one too, and recreates it."""

CURRENT_JUMPS = jumps_by_chain(JUMPS)

_IPVS_CHAINS = frozenset({(NAT, "KUBE-LOAD-BALANCER"), (NAT, "KUBE-NODE-PORT"), (NAT, "KUBE-FIRE-WALL")})
"""Chains of kube-proxy's ipvs mode that jump to shared ones."""

_SNAT_COMMENT = '"kubernetes service traffic requiring SNAT"'
"""Comment of a rule that old versions had in POSTROUTING itself, not in a chain of its own."""


def plan_cleanup(held: RulesByChain) -> Removal:
    """Decide which rules and chains in *held* are this mode's."""
    ours = {key for key in held if names.is_ours(*key) or key in OLDER_CHAINS} - ipset_mode_chains(held)
    return plan_removal(held, ours, partial(_is_own, ours), _IPVS_CHAINS.__contains__)


def plan_supersede(held: RulesByChain) -> Removal:
    """Decide which rules and chains in *held* are leftovers of older versions of this mode."""
    return plan_removal(held, OLDER_CHAINS & held.keys(), is_older, _IPVS_CHAINS.__contains__)


def is_older(key: ChainKey, rule: str) -> bool:
    current = CURRENT_JUMPS.get(key, ())
    return _is_own(names.OUR_CHAINS | OLDER_CHAINS, key, rule) and not has_rule(current, rule)


def _is_own(ours: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    """Return whether a rule in a built-in chain jumps to one of *ours*, or is the old rule in POSTROUTING."""
    found = parse_jump(key, rule)
    if found is None:
        return rule.endswith("-j MASQUERADE") and _SNAT_COMMENT in rule
    target = found.target_key
    wanted = target in ours or (target == FIREWALL and not is_ipset_firewall_jump(key, rule))
    return wanted and found.comment.startswith("kube")


# Removal.

_clean = partial(clean_up, plan_cleanup, counted=names.SERVICE_PREFIXES)


def cleanup(*, dry_run: bool) -> Leftovers:
    """Remove all rules from both variants, nf_tables and legacy, and both families, and the counters."""
    rules = _clean(find_variants(), dry_run=dry_run)
    return Leftovers.merged([rules, clean_up_counts("iptables", dry_run=dry_run)])


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove the leftovers of older versions, and all rules from the variant that this node does not use."""
    used, unused = find_used_and_unused()
    older = clean_up(plan_supersede, used, dry_run=dry_run, is_affected=_has_older)
    return Leftovers.merged([older, _clean(unused, dry_run=dry_run)])


def _has_older(tables: Tables) -> bool:
    """Return whether leftovers of older versions exist. Reads only a few chains: there may be many."""
    return any(tables.has_chain(*key) for key in OLDER_CHAINS) or any(
        is_older(key, rule) for key in CURRENT_JUMPS for rule in tables.rules(*key))
