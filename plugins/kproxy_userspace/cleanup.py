"""Removal of every trace of the mode: kube-proxy's portal chains, and our nftables table."""

from kproxy_core.contract import Family, HostError, Leftovers
from kproxy_nft.table import delete_table
from kproxy_userspace.kernel.portals import may_have_portals
from kproxy_userspace.skeleton import nft_table, plan_cleanup, plan_own_cleanup
from kproxy_xtables.cleanup import clean_up
from kproxy_xtables.variant import find_variants


def cleanup(*, dry_run: bool, own_only: bool = False) -> Leftovers:
    """Delete the portals of both families. *own_only* keeps chains that kube-proxy has filled."""
    plan = plan_own_cleanup if own_only else plan_cleanup
    found = [clean_up(plan, find_variants(), dry_run=dry_run, is_affected=may_have_portals)]
    for family in Family:
        try:
            found.append(Leftovers(tuple(delete_table(nft_table(family), dry_run=dry_run))))
        except HostError as error:
            found.append(Leftovers(errors=(str(error),)))
    return Leftovers.merged(found)
