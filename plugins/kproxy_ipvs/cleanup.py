"""Removing every trace of the mode: ours, which is kube-proxy's as well."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from kproxy_core.backend.api import Leftovers
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.iptables import Tables
from kproxy_core.host.iptables_variant import find_variants
from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address
from kproxy_ipvs import device, listing, names, rules, sets
from kproxy_ipvs.applied import Entries
from kproxy_ipvs.batch import DeleteServer
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.render import ServerKey
from kproxy_ipvs.skeleton import JUMPS, KUBE_PROXY_JUMPS, ChainKey
from kproxy_ipvs.virtual_servers import VirtualServers

_OWN = frozenset({
    (FILTER, names.NODE_PORT), (FILTER, names.IPVS_FILTER),
    (NAT, names.NODE_PORT), (NAT, names.LOAD_BALANCER), (NAT, names.IPVS_POSTROUTING),
    (MANGLE, names.IPVS_ACCESS), (MANGLE, names.SOURCE_RANGES), (MANGLE, names.SHORT_CIRCUITS),
})  # fmt: skip
_SHARED = frozenset({
    (NAT, names.SERVICES), (NAT, names.POSTROUTING), (NAT, names.MARK_MASQ), (FILTER, names.FORWARD),
})  # fmt: skip
"""Chains that the iptables mode has under the same names."""

_KNOWN_BY_SETS = (FILTER, "KUBE-PROXY-FIREWALL")
"""kube-proxy's in both modes; the comment of a jump to it tells them apart."""


def cleanup(excluded: Sequence[Cidr] = (), *, dry_run: bool) -> Leftovers:
    """Remove what is there, of both families. Virtual servers of others and in *excluded* networks stay."""
    removed: list[str] = []
    errors: list[str] = []
    entries: dict[Family, Entries] = {}
    if programs.find("ipset"):
        try:
            entries = {family: sets.read(family) for family in Family}
        except HostError as error:
            if "Operation not permitted" in str(error):
                return Leftovers("ipvs", (), (str(error),))
    for step in (partial(_servers, excluded), _rules, _device_and_sets):
        try:
            removed += step(entries, dry_run)
        except (HostError, SyncFailed) as error:
            errors.append(str(error))
    return Leftovers("ipvs", tuple(removed), tuple(errors))


def _servers(excluded: Sequence[Cidr], entries: Mapping[Family, Entries], dry_run: bool) -> list[str]:
    if not listing.SERVERS.exists():
        return []
    servers = VirtualServers()
    try:
        gone: list[DeleteServer] = []
        for family in Family:
            on_device = device.read(family)[0]
            gone += [
                DeleteServer(key)
                for key in servers.read(family)
                if is_left(key, on_device, entries.get(family, {}), excluded)
            ]
        if not dry_run:
            servers.write(gone)
    finally:
        servers.close()
    return [f"virtual server {operation.key}" for operation in gone]


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


def _rules(entries: dict[Family, Entries], dry_run: bool) -> list[str]:
    removed: list[str] = []
    bare = not any(entries.values()) and not device.exists()
    for variant in find_variants():
        for family in Family:
            tables = Tables(family, variant)
            if bare and variant.nft and not tables.has_chain(FILTER, names.IPVS_FILTER):
                continue  # nothing of this mode is there, and the iptables mode's rules may be many
            held = rules.read(tables)
            jumps, chains = what_to_remove(held)
            if not dry_run and (text := rules.removal(jumps, chains)):
                tables.restore(text)
            removed += [f"{tables.program}: rule in {chain}: {spec}"
                        for (_, chain), specs in jumps.items() for spec in specs]  # fmt: skip
            removed += [f"{tables.program}: chain {chain} of table {table}" for table, chain in chains]
    return removed


def what_to_remove(held: rules.Chains) -> tuple[dict[ChainKey, list[str]], list[ChainKey]]:
    """Jumps by built-in chain, and chains. What the iptables mode has taken over is left to it."""
    ours = _OWN | names.KUBE_PROXY_CHAINS
    if not _is_ours(held.get(_KNOWN_BY_SETS, ()), held):
        ours -= {_KNOWN_BY_SETS}
    retired = (NAT, names.SERVICES) not in held and any(key in held for key in ours)
    if retired or rules.are_of_this_mode(held):
        ours |= _SHARED
    jumps: dict[ChainKey, list[str]] = {}
    for jump in (*JUMPS, *KUBE_PROXY_JUMPS):
        if (jump.table, jump.target) in ours:
            found = [rule for rule in held.get((jump.table, jump.chain), ()) if rule == jump.spec]
            if found:
                jumps.setdefault((jump.table, jump.chain), []).extend(found)
    return jumps, sorted(key for key in ours if key in held)


def _is_ours(firewall: Sequence[str], held: rules.Chains) -> bool:
    """Whether the *firewall* chain is this mode's; an empty one is, unless jumps of others lead to it."""
    if firewall:
        return any("--match-set" in rule for rule in firewall)
    specs = {jump.spec for jump in KUBE_PROXY_JUMPS}
    table, name = _KNOWN_BY_SETS
    return not any(
        rule.endswith(f"-j {name}") and rule not in specs
        for (of, _), found in held.items() if of == table for rule in found
    )  # fmt: skip


def _device_and_sets(entries: dict[Family, Entries], dry_run: bool) -> list[str]:
    removed: list[str] = []
    if device.exists():
        removed.append(f"interface {names.DEVICE}")
        if not dry_run:
            device.delete()
    found = [kind.full_name(family) for family, held in entries.items() for kind in held]
    removed += [f"ipset {name}" for name in found]
    if not dry_run:
        sets.destroy(found)
    return removed
