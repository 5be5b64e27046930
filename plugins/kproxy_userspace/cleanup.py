"""Removing every trace of the mode: kube-proxy's portal chains, and our nftables table."""

from kproxy_core.backend.api import Leftovers
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.iptables import Tables
from kproxy_core.host.iptables_variant import find_variants
from kproxy_core.model.address import Family
from kproxy_userspace.kernel import IptablesPortals, NftPortals, Portals


def cleanup(*, dry_run: bool) -> Leftovers:
    """Remove what is there, in both families."""
    removed: list[str] = []
    errors: list[str] = []
    variants = find_variants()
    for family in Family:
        places: list[Portals] = [IptablesPortals(Tables(family, variant)) for variant in variants]
        if programs.find("nft"):
            places.append(NftPortals(family))
        for portals in places:
            try:
                removed += portals.remove(dry_run=dry_run)
            except HostError as error:
                errors.append(str(error))
    return Leftovers("userspace", tuple(removed), tuple(errors))
