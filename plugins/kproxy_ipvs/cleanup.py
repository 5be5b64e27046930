"""Removing every trace of the mode: ours, which is kube-proxy's as well."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from kproxy_core.backend.api import Leftovers
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries
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

EntriesByFamily = dict[Family, Entries]

_OF_BOTH = frozenset({
    (FILTER, names.NODE_PORT), (FILTER, names.IPVS_FILTER),
    (NAT, names.NODE_PORT), (NAT, names.LOAD_BALANCER),
})  # fmt: skip
"""Chains that kube-proxy has and we have."""
_KUBE_PROXYS = frozenset({(FILTER, names.SOURCE_RANGES), (FILTER, "KUBE-IPVS-OUT-FILTER")})
_OLDER = frozenset({(NAT, "KUBE-FIRE-WALL"), (NAT, "KUBE-MARK-DROP")})
"""Up to kube-proxy 1.24 and 1.27. The second is kubelet's, too, which makes it again."""

_NEVER_KUBE_PROXYS = frozenset({
    (MANGLE, names.IPVS_ACCESS), (MANGLE, names.SOURCE_RANGES), (MANGLE, names.SHORT_CIRCUITS),
})  # fmt: skip
_SETS_NEVER_KUBE_PROXYS = (names.SHORT_CIRCUIT, names.NO_LOCAL)

_CHAIN_OF_IPTABLES = re.compile("KUBE-(?:NODEPORTS|(?:SVC|SVL|SEP|FW|EXT|XLB)-[A-Z2-7]{16})")
"""Chains of the iptables mode that lead to shared ones."""


def cleanup(excluded: Sequence[Cidr] = (), *, dry_run: bool, own_only: bool = False) -> Leftovers:
    """Remove what is there, of both families. Virtual servers of others and in *excluded* networks stay.

    *own_only* leaves what kube-proxy in this mode has under the same names.
    """
    entries: EntriesByFamily = {}
    if programs.find("ipset"):
        try:
            entries = {family: sets.read(family) for family in Family}
        except HostError as error:
            if "Operation not permitted" in str(error):
                return Leftovers("ipvs", (), (str(error),))
    kinds = _SETS_NEVER_KUBE_PROXYS if own_only else (*names.SETS, *names.OLDER_SETS)
    return _performed(
        partial(_servers, excluded, entries, dry_run, own_only),
        partial(_rules, entries, dry_run, own_only),
        *(() if own_only else [partial(_device, dry_run)]),
        *([partial(_sets, kinds, dry_run)] if entries else ()),
    )


def supersede(*, dry_run: bool) -> Leftovers:
    """Remove what only kube-proxy has, and all rules from the interface that this node does not use."""
    used, unused = find_used_and_unused()
    return _performed(
        partial(clean_up, what_only_kube_proxy_has, used, dry_run=dry_run),
        partial(clean_up, what_to_remove, unused, dry_run=dry_run),
        partial(_sets, names.OLDER_SETS, dry_run),
    )


def _performed(*steps: Callable[[], CleanupResult]) -> Leftovers:
    """What came of *steps*, one after another; one that fails keeps no other from being tried."""
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
        gone: list[DeleteServer] = []
        for family in Family:
            on_device = device.read(family)[0]
            gone += [
                DeleteServer(key)
                for key in servers.read(family)
                if (key.address is None or not own_only)
                and is_left(key, on_device, entries.get(family, {}), excluded)
            ]
        if not dry_run:
            servers.write(gone)
    finally:
        servers.close()
    return CleanupResult([f"virtual server {operation.key}" for operation in gone])


def is_left(
    key: ServerKey, on_device: Collection[Address], entries: Entries, excluded: Iterable[Cidr]
) -> bool:
    """Whether a virtual server is this mode's: our device or our sets speak of it."""
    if key.address is None:
        return key.mark in entries.get(names.SHORT_CIRCUIT, {}).values()
    if any(key.address in cidr for cidr in excluded):
        return False
    text = format_address(key.address)
    every, _ = names.NODE_PORT_SETS[Protocol(key.protocol)]
    entry = str(key.port) if every.type == "bitmap:port" else f"{text},sctp:{key.port}"
    return (
        key.address in on_device
        or text in entries.get(names.IPVS_IPS, ())
        or entry in entries.get(every, ())
    )


def _rules(entries: EntriesByFamily, dry_run: bool, own_only: bool) -> CleanupResult:
    bare = not any(entries.values()) and not device.exists()
    marker = (MANGLE, names.IPVS_ACCESS) if own_only else (NAT, names.NODE_PORT)

    def is_affected(tables: Tables) -> bool:
        """If nothing else of this mode is there, ask for one chain: the iptables mode's rules may be many."""
        return not (bare and tables.variant.nft) or tables.has_chain(*marker)

    decide = what_only_we_have if own_only else what_to_remove
    return clean_up(decide, find_variants(), dry_run=dry_run, is_affected=is_affected)


def what_to_remove(held: RulesByChain, kept: frozenset[ChainKey] = frozenset()) -> Removal:
    """Decide what of *held* is this mode's, and goes unless it is to be *kept*.

    What the iptables mode has taken over is left to it.
    """
    ours = (_OF_BOTH | _KUBE_PROXYS | _OLDER | _NEVER_KUBE_PROXYS | ipset_mode_chains(held)) - kept

    def is_own(key: ChainKey, rule: str) -> bool:
        return _leads_to(ours, key, rule) or is_ipset_firewall_jump(key, rule)

    return plan_removal(held, ours, is_own, _is_of_iptables)


def what_only_kube_proxy_has(held: RulesByChain) -> Removal:
    """What of *held* this mode has no use for."""
    ours = _KUBE_PROXYS | _OLDER | (ipset_mode_chains(held) & {FIREWALL})
    targets = ours | _OF_BOTH | ipset_mode_chains(held)
    current = {(jump.table, jump.chain, jump.spec) for jump in JUMPS}

    def is_own(key: ChainKey, rule: str) -> bool:
        if is_ipset_firewall_jump(key, rule):
            return True
        return _leads_to(targets, key, rule) and (*key, rule) not in current

    return plan_removal(held, ours, is_own, _is_of_iptables)


def what_only_we_have(held: RulesByChain) -> Removal:
    """What of *held* can't be kube-proxy's."""
    return plan_removal(
        held, _NEVER_KUBE_PROXYS, partial(_leads_to, _NEVER_KUBE_PROXYS), _is_of_iptables
    )


def _leads_to(ours: Collection[ChainKey], key: ChainKey, rule: str) -> bool:
    found = parse_jump(key, rule)
    return found is not None and found.target_key in ours and found.comment.startswith("kube")


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
    stay = {} if dry_run else sets.destroy(found)
    return CleanupResult(
        [f"ipset {name}" for name in found if name not in stay],
        [f"ipset {name}: {error}" for name, error in stay.items()],
    )
