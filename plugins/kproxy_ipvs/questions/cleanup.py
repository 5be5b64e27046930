"""Removal of every trace of the mode, of this program and of kube-proxy."""

import errno
from collections.abc import Callable, Iterable, Sequence

from kproxy_core.backend.api import Leftovers
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Cidr, Family
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries
from kproxy_ipvs.batch.servers import DeleteServer
from kproxy_ipvs.kernel import device, listing, sets
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import MANGLE, NAT
from kproxy_ipvs.questions.removal import is_leftover, plan_cleanup, plan_kube_proxy_cleanup, plan_own_cleanup
from kproxy_nft.table import clean_up_counts
from kproxy_xtables.cleanup import clean_up
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_used_and_unused, find_variants

_MODE = "ipvs"
_SETS_NEVER_KUBE_PROXYS = (names.SHORT_CIRCUIT, names.NO_LOCAL)

EntriesByFamily = dict[Family, Entries]


def cleanup(excluded: Sequence[Cidr] = (), *, dry_run: bool, own_only: bool = False) -> Leftovers:
    """Remove all objects of the mode, of both families.

    Virtual servers of other tools and in *excluded* networks are kept. *own_only* also keeps objects that
    kube-proxy's ipvs mode has under the same names.
    """
    entries: EntriesByFamily = {}
    if programs.find("ipset"):
        try:
            entries = {family: sets.read(family) for family in Family}
        except HostError as error:
            if error.errno == errno.EPERM:
                return Leftovers(_MODE, (), (str(error),))
    servers = _attempt(lambda: _servers(excluded, entries, dry_run, own_only))
    found = [servers, _attempt(lambda: _rules(entries, dry_run, own_only))]
    # The device's addresses and the sets' marks tell which virtual servers are this mode's: the next clean-up
    # needs them while any are left.
    if not servers.errors:
        kinds = _SETS_NEVER_KUBE_PROXYS if own_only else (*names.SETS, *names.OLDER_SETS)
        found += () if own_only else [_attempt(lambda: _device(dry_run))]
        found += [_attempt(lambda: _sets(kinds, dry_run))] if entries else ()
    found.append(clean_up_counts(_MODE, dry_run=dry_run, ipvs=True))
    return Leftovers.merged(_MODE, found)


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove objects that only kube-proxy has, and all rules in the unused variant of iptables."""
    used, unused = find_used_and_unused()
    return Leftovers.merged(_MODE, [
        clean_up(_MODE, plan_kube_proxy_cleanup, used, dry_run=dry_run),
        clean_up(_MODE, plan_cleanup, unused, dry_run=dry_run),
        _attempt(lambda: _sets(names.OLDER_SETS, dry_run)),
    ])


def _attempt(step: Callable[[], Leftovers]) -> Leftovers:
    """Return the result of one step. A failed one does not prevent the next."""
    try:
        return step()
    except HostError as error:
        return Leftovers(_MODE, errors=(str(error),))


def _servers(excluded: Sequence[Cidr], entries: EntriesByFamily, dry_run: bool, own_only: bool) -> Leftovers:
    if not listing.SERVERS.exists():
        return Leftovers(_MODE)
    deleted: list[DeleteServer] = []
    with VirtualServers() as servers:
        for family in Family:
            on_device = device.read(family)[0]
            deleted += [
                DeleteServer(key)
                for key in servers.schedulings(family)
                if (key.address is None or not own_only)
                and is_leftover(key, on_device, entries.get(family, {}), excluded)
            ]
        if not dry_run:
            servers.write(deleted)
    return Leftovers(_MODE, tuple(f"virtual server {operation.key}" for operation in deleted))


def _rules(entries: EntriesByFamily, dry_run: bool, own_only: bool) -> Leftovers:
    no_other_objects = not any(entries.values()) and not device.exists()
    marker = (MANGLE, names.IPVS_ACCESS) if own_only else (NAT, names.NODE_PORT)

    def is_affected(tables: Tables) -> bool:
        """Look for one chain if no other object exists: to list the iptables mode's rules may take long."""
        return not (no_other_objects and tables.variant.nft) or tables.has_chain(*marker)

    decide = plan_own_cleanup if own_only else plan_cleanup
    return clean_up(_MODE, decide, find_variants(), dry_run=dry_run, is_affected=is_affected)


def _device(dry_run: bool) -> Leftovers:
    if not device.exists():
        return Leftovers(_MODE)
    if not dry_run:
        device.delete()
    return Leftovers(_MODE, (f"interface {names.DEVICE}",))


def _sets(kinds: Iterable[names.SetKind], dry_run: bool) -> Leftovers:
    found = sets.existing(kinds)
    failed = {} if dry_run else sets.destroy(found)
    return Leftovers(
        _MODE, tuple(f"ipset {name}" for name in found if name not in failed),
        tuple(f"ipset {name}: {error}" for name, error in failed.items()),
    )
