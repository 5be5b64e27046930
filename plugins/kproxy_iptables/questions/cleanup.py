"""Removal of every trace of the mode: its chains and rules, and those of all versions of kube-proxy."""

from functools import partial

from kproxy_core.backend.api import Leftovers
from kproxy_iptables import names
from kproxy_iptables.questions import removal
from kproxy_nft.table import clean_up_counts
from kproxy_xtables.cleanup import clean_up
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_used_and_unused, find_variants

_clean = partial(clean_up, "iptables", removal.plan_cleanup, counted=names.SERVICE_PREFIXES)


def cleanup(*, dry_run: bool) -> Leftovers:
    """Remove all rules from both variants, nf_tables and legacy, and both families, and the counts."""
    rules = _clean(find_variants(), dry_run=dry_run)
    return Leftovers.merged("iptables", [rules, clean_up_counts("iptables", dry_run=dry_run)])


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove the leftovers of older versions, and all rules from the variant that this node does not use."""
    used, unused = find_used_and_unused()
    older = clean_up("iptables", removal.plan_supersede, used, dry_run=dry_run, is_affected=_has_older)
    return Leftovers.merged("iptables", [older, _clean(unused, dry_run=dry_run)])


def _has_older(tables: Tables) -> bool:
    """Return whether older versions left anything. Reads only a few chains, because there may be many."""
    return any(tables.has_chain(*key) for key in removal.OLDER_CHAINS) or any(
        removal.is_older(key, rule) for key in removal.CURRENT_JUMPS for rule in tables.rules(*key))
