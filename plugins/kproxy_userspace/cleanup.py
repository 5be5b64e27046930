"""Removing every trace of the mode: kube-proxy's portal chains, and our nftables table."""

from kproxy_core.backend.api import Leftovers
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.model.address import Family
from kproxy_userspace.kernel import IptablesPortals, NftPortals, Portals, find_program, has_iptables


def cleanup(*, dry_run: bool) -> Leftovers:
    """Remove what is there, in both families."""
    removed: list[str] = []
    errors: list[str] = []
    for family in Family:
        places: list[Portals] = []
        if has_iptables():
            places.append(IptablesPortals(family))
        if find_program("nft"):
            places.append(NftPortals(family))
        for portals in places:
            try:
                removed += portals.remove(dry_run=dry_run)
            except SyncFailed as error:
                errors.append(str(error))
    return Leftovers("userspace", tuple(removed), tuple(errors))
