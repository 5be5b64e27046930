"""Removing every trace of the mode: kube-proxy's portal chains, and our nftables table."""

from kproxy_core.backend.api import Leftovers
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_userspace.kernel.portals import NftPortals, may_have_portals
from kproxy_userspace.removal import what_is_not_kube_proxys, what_to_remove
from kproxy_xtables.cleanup import clean_up
from kproxy_xtables.variant import find_variants


def cleanup(*, dry_run: bool, own_only: bool = False) -> Leftovers:
    """Remove what is there, in both families; *own_only* leaves chains that kube-proxy has filled."""
    decide = what_is_not_kube_proxys if own_only else what_to_remove
    cleaned = clean_up(decide, find_variants(), dry_run=dry_run, is_affected=may_have_portals)
    for family in Family if programs.find("nft") else ():
        try:
            cleaned.removed += NftPortals(family, None).remove(dry_run=dry_run)
        except HostError as error:
            cleaned.errors.append(str(error))
    return Leftovers("userspace", tuple(cleaned.removed), tuple(cleaned.errors))
