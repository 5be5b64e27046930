"""Removal of every trace of the mode, of this program and of kube-proxy."""

import errno
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from kproxy_core.backend.api import Leftovers
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Cidr, Family
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries, is_owned
from kproxy_ipvs.batch.servers import DeleteServer
from kproxy_ipvs.kernel import device, listing, sets
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS
from kproxy_ipvs.wanted import ServerKey
from kproxy_xtables.cleanup import CleanupResult, clean_up
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import ChainKey, RulesByChain, parse_jump
from kproxy_xtables.shared_chains import FIREWALL, ipset_mode_chains, is_ipset_firewall_jump
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_used_and_unused, find_variants

Step = Callable[[], CleanupResult]
EntriesByFamily = dict[Family, Entries]

_OF_BOTH = frozenset({
    (FILTER, names.NODE_PORT), (FILTER, names.IPVS_FILTER),
    (NAT, names.NODE_PORT), (NAT, names.LOAD_BALANCER),
})  # fmt: skip
"""Chains of both kube-proxy and this program."""
_KUBE_PROXYS = frozenset({(FILTER, names.SOURCE_RANGES), (FILTER, "KUBE-IPVS-OUT-FILTER")})
_OLDER = frozenset({(NAT, "KUBE-FIRE-WALL"), (NAT, "KUBE-MARK-DROP")})
"""Chains of kube-proxy up to 1.24 and up to 1.27. kubelet has the second as well, and recreates it."""

_NEVER_KUBE_PROXYS = frozenset({
    (MANGLE, names.IPVS_ACCESS), (MANGLE, names.SOURCE_RANGES), (MANGLE, names.SHORT_CIRCUITS),
})  # fmt: skip
_SETS_NEVER_KUBE_PROXYS = (names.SHORT_CIRCUIT, names.NO_LOCAL)

_CHAIN_OF_IPTABLES = re.compile("KUBE-(?:NODEPORTS|(?:SVC|SVL|SEP|FW|EXT|XLB)-[A-Z2-7]{16})")
"""Chains of the iptables mode that jump to shared ones."""


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
                return Leftovers("ipvs", (), (str(error),))
    servers = _run(partial(_servers, excluded, entries, dry_run, own_only))
    steps: list[Step] = [partial(_rules, entries, dry_run, own_only)]
    # The device's addresses and the sets' marks tell which virtual servers are this mode's: the next clean-up
    # needs them while any are left.
    if not servers.errors:
        kinds = _SETS_NEVER_KUBE_PROXYS if own_only else (*names.SETS, *names.OLDER_SETS)
        steps += () if own_only else [partial(_device, dry_run)]
        steps += [partial(_sets, kinds, dry_run)] if entries else ()
    rest = _run(*steps)
    return Leftovers("ipvs", servers.removed + rest.removed, servers.errors + rest.errors)


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove objects that only kube-proxy has, and all rules in the unused variant of iptables."""
    used, unused = find_used_and_unused()
    return _run(
        partial(clean_up, plan_kube_proxy_cleanup, used, dry_run=dry_run),
        partial(clean_up, plan_cleanup, unused, dry_run=dry_run),
        partial(_sets, names.OLDER_SETS, dry_run),
    )


def _run(*steps: Step) -> Leftovers:
    """Run all *steps* in order. A failed step does not prevent the next ones."""
    removed: list[str] = []
    errors: list[str] = []
    for step in steps:
        try:
            done = step()
        except HostError as error:
            errors.append(str(error))
        else:
            removed += done.removed
            errors += done.errors
    return Leftovers("ipvs", tuple(removed), tuple(errors))


def _servers(
    excluded: Sequence[Cidr], entries: EntriesByFamily, dry_run: bool, own_only: bool
) -> CleanupResult:
    if not listing.SERVERS.exists():
        return CleanupResult()
    servers = VirtualServers()
    try:
        deleted: list[DeleteServer] = []
        for family in Family:
            on_device = device.read(family)[0]
            deleted += [
                DeleteServer(key)
                for key in servers.read(family)
                if (key.address is None or not own_only)
                and is_leftover(key, on_device, entries.get(family, {}), excluded)
            ]
        if not dry_run:
            servers.write(deleted)
    finally:
        servers.close()
    return CleanupResult([f"virtual server {operation.key}" for operation in deleted])


def is_leftover(
    key: ServerKey, on_device: Collection[Address], entries: Entries, excluded: Iterable[Cidr]
) -> bool:
    """Tell whether a virtual server is this mode's. Its mark must be in the set of short circuits."""
    marks = entries.get(names.SHORT_CIRCUIT, {}).values()
    return is_owned(key, on_device, entries, excluded, lambda mark: mark in marks)


def _rules(entries: EntriesByFamily, dry_run: bool, own_only: bool) -> CleanupResult:
    no_other_objects = not any(entries.values()) and not device.exists()
    marker = (MANGLE, names.IPVS_ACCESS) if own_only else (NAT, names.NODE_PORT)

    def is_affected(tables: Tables) -> bool:
        """Look for one chain if no other object exists: to list the iptables mode's rules may take long."""
        return not (no_other_objects and tables.variant.nft) or tables.has_chain(*marker)

    decide = plan_own_cleanup if own_only else plan_cleanup
    return clean_up(decide, find_variants(), dry_run=dry_run, is_affected=is_affected)


def plan_cleanup(held: RulesByChain, kept: frozenset[ChainKey] = frozenset()) -> Removal:
    """Select all chains and rules of this mode, except the chains *kept*.

    Shared chains that the iptables mode has taken over are not selected.
    """
    ours = (_OF_BOTH | _KUBE_PROXYS | _OLDER | _NEVER_KUBE_PROXYS | ipset_mode_chains(held)) - kept

    def is_own(key: ChainKey, rule: str) -> bool:
        return _jumps_to(ours, key, rule) or is_ipset_firewall_jump(key, rule)

    return plan_removal(held, ours, is_own, _is_of_iptables)


def plan_kube_proxy_cleanup(held: RulesByChain) -> Removal:
    """Select the chains and rules of kube-proxy's ipvs mode that this program does not use."""
    ours = _KUBE_PROXYS | _OLDER | (ipset_mode_chains(held) & {FIREWALL})
    targets = ours | _OF_BOTH | ipset_mode_chains(held)
    current = {(jump.table, jump.chain, jump.spec) for jump in JUMPS}

    def is_own(key: ChainKey, rule: str) -> bool:
        if is_ipset_firewall_jump(key, rule):
            return True
        return _jumps_to(targets, key, rule) and (*key, rule) not in current

    return plan_removal(held, ours, is_own, _is_of_iptables)


def plan_own_cleanup(held: RulesByChain) -> Removal:
    """Select the chains and rules that kube-proxy never has."""
    return plan_removal(
        held, _NEVER_KUBE_PROXYS, partial(_jumps_to, _NEVER_KUBE_PROXYS), _is_of_iptables
    )


def _jumps_to(chains: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    jump = parse_jump(key, rule)
    return jump is not None and jump.target_key in chains and jump.comment.startswith("kube")


def _is_of_iptables(key: ChainKey) -> bool:
    return key[0] == NAT and _CHAIN_OF_IPTABLES.fullmatch(key[1]) is not None


def _device(dry_run: bool) -> CleanupResult:
    if not device.exists():
        return CleanupResult()
    if not dry_run:
        device.delete()
    return CleanupResult([f"interface {names.DEVICE}"])


def _sets(kinds: Iterable[names.SetKind], dry_run: bool) -> CleanupResult:
    found = sets.existing(kinds)
    failed = {} if dry_run else sets.destroy(found)
    return CleanupResult(
        [f"ipset {name}" for name in found if name not in failed],
        [f"ipset {name}: {error}" for name, error in failed.items()],
    )
