"""Removal of every trace of the mode, of this program and of kube-proxy."""

import errno
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from kproxy_core.contract import Address, Cidr, Family, HostError, Leftovers
from kproxy_core.linux import programs
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries, is_owned
from kproxy_ipvs.batch import DeleteServer
from kproxy_ipvs.kernel import connections, device, sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS
from kproxy_ipvs.wanted import ServerKey
from kproxy_nft.table import clean_up_counts
from kproxy_xtables.cleanup import clean_up
from kproxy_xtables.removal import Removal, plan_removal
from kproxy_xtables.rules import (
    FIREWALL,
    ChainKey,
    RulesByChain,
    ipset_mode_chains,
    is_ipset_firewall_jump,
    parse_jump,
)
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_used_and_unused, find_variants

# Decisions about ownership. Pure.

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

_CHAIN_OF_IPTABLES = re.compile("KUBE-(?:NODEPORTS|(?:SVC|SVL|SEP|FW|EXT|XLB)-[A-Z2-7]{16})")
"""Chains of the iptables mode that jump to shared ones."""


def is_leftover(
    key: ServerKey, on_device: Collection[Address], entries: Entries, excluded: Iterable[Cidr]
) -> bool:
    """Return whether a virtual server is this mode's. Its mark must be in the set of short circuits."""
    marks = entries.get(names.SHORT_CIRCUIT, {}).values()
    return is_owned(key, on_device, entries, excluded, lambda mark: mark in marks)


def plan_cleanup(held: RulesByChain, kept: frozenset[ChainKey] = frozenset()) -> Removal:
    """Select all chains and rules of this mode, except the chains *kept*.

    Shared chains that the iptables mode has taken over are not selected.
    """
    ours = (_OF_BOTH | _KUBE_PROXYS | _OLDER | _NEVER_KUBE_PROXYS | ipset_mode_chains(held)) - kept
    return plan_removal(held, ours, partial(_is_own, ours), _is_of_iptables)


def plan_kube_proxy_cleanup(held: RulesByChain) -> Removal:
    """Select the chains and rules of kube-proxy's ipvs mode that this program does not use."""
    ours = _KUBE_PROXYS | _OLDER | (ipset_mode_chains(held) & {FIREWALL})
    targets = ours | _OF_BOTH | ipset_mode_chains(held)
    current = {(jump.table, jump.chain, jump.spec) for jump in JUMPS}

    def is_own(key: ChainKey, rule: str) -> bool:
        return _is_own(targets, key, rule) and (*key, rule) not in current

    return plan_removal(held, ours, is_own, _is_of_iptables)


def plan_own_cleanup(held: RulesByChain) -> Removal:
    """Select the chains and rules that kube-proxy never has."""
    return plan_removal(held, _NEVER_KUBE_PROXYS, partial(_jumps_to, _NEVER_KUBE_PROXYS), _is_of_iptables)


def _is_own(ours: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    return _jumps_to(ours, key, rule) or is_ipset_firewall_jump(key, rule)


def _jumps_to(chains: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    jump = parse_jump(key, rule)
    return jump is not None and jump.target_key in chains and jump.comment.startswith("kube")


def _is_of_iptables(key: ChainKey) -> bool:
    return key[0] == NAT and _CHAIN_OF_IPTABLES.fullmatch(key[1]) is not None


# Removal.

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
                return Leftovers((), (str(error),))
    servers = _attempt(lambda: _servers(excluded, entries, dry_run, own_only))
    found = [servers, _attempt(lambda: _rules(entries, dry_run, own_only))]
    # The device's addresses and the sets' marks identify this mode's virtual servers: the next clean-up needs
    # them while any of those exist.
    if not servers.errors:
        of_both = (*names.SETS, *names.OLDER_SETS, names.REPLACEMENT)
        kinds = _SETS_NEVER_KUBE_PROXYS if own_only else of_both
        found += () if own_only else [_attempt(lambda: _device(dry_run))]
        found += [_attempt(lambda: _sets(kinds, dry_run))] if entries else ()
    found.append(clean_up_counts(_MODE, dry_run=dry_run, ipvs=True))
    return Leftovers.merged(found)


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove objects that only kube-proxy has, and all rules in the unused variant of iptables."""
    used, unused = find_used_and_unused()
    return Leftovers.merged([
        clean_up(plan_kube_proxy_cleanup, used, dry_run=dry_run),
        clean_up(plan_cleanup, unused, dry_run=dry_run),
        _attempt(lambda: _sets(names.OLDER_SETS, dry_run)),
    ])


def _attempt(step: Callable[[], Leftovers]) -> Leftovers:
    """Return the result of one step. A failed one does not prevent the next."""
    try:
        return step()
    except HostError as error:
        return Leftovers(errors=(str(error),))


def _servers(excluded: Sequence[Cidr], entries: EntriesByFamily, dry_run: bool, own_only: bool) -> Leftovers:
    if not connections.SERVERS.exists():
        return Leftovers()
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
    return Leftovers(tuple(f"virtual server {operation.key}" for operation in deleted))


def _rules(entries: EntriesByFamily, dry_run: bool, own_only: bool) -> Leftovers:
    no_other_objects = not any(entries.values()) and not device.exists()
    marker = (MANGLE, names.IPVS_ACCESS) if own_only else (NAT, names.NODE_PORT)

    def is_affected(tables: Tables) -> bool:
        """Look for one chain if no other object exists: listing the iptables mode's rules may take long."""
        return not (no_other_objects and tables.variant.nft) or tables.has_chain(*marker)

    decide = plan_own_cleanup if own_only else plan_cleanup
    return clean_up(decide, find_variants(), dry_run=dry_run, is_affected=is_affected)


def _device(dry_run: bool) -> Leftovers:
    if not device.exists():
        return Leftovers()
    if not dry_run:
        device.delete()
    return Leftovers((f"interface {names.DEVICE}",))


def _sets(kinds: Iterable[names.SetKind], dry_run: bool) -> Leftovers:
    found = sets.existing(kinds)
    failed = {} if dry_run else sets.destroy(found)
    return Leftovers(
        tuple(f"ipset {name}" for name in found if name not in failed),
        tuple(f"ipset {name}: {error}" for name, error in failed.items()),
    )
