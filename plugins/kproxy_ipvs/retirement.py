"""Leaving the node to another mode without ending connections.

That mode's rules decide about new connections before IPVS sees them: a packet to a VIP has another
destination by then. Connections that go through IPVS still need their virtual server, their real server, and
the VIP on our device. Everything else goes at once.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.backend.api import Leftovers
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import conntrack, programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.iptables import Tables
from kproxy_core.host.iptables_removal import described, inputs
from kproxy_core.host.iptables_variant import find_variants
from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.plan.stale_flows import StaleFlows
from kproxy_ipvs import device, listing, names, rules, sets
from kproxy_ipvs.applied import Entries
from kproxy_ipvs.batch import DeleteDestination, DeleteServer, Listed, Operation, PutDestination
from kproxy_ipvs.cleanup import is_left, what_to_remove
from kproxy_ipvs.names import FILTER, NAT
from kproxy_ipvs.render import Element, ServerKey
from kproxy_ipvs.skeleton import JUMPS, device_chains
from kproxy_ipvs.virtual_servers import VirtualServers

_KEPT_CHAINS = frozenset({
    (FILTER, names.FORWARD), (FILTER, names.IPVS_FILTER), (NAT, names.IPVS_POSTROUTING)
})  # fmt: skip
"""Answers are forwarded, and VIPs stay on the device."""

_KEPT_SETS = frozenset({
    names.IPVS_IPS, names.SHORT_CIRCUIT, *(kind for kinds in names.NODE_PORT_SETS.values() for kind in kinds)
})  # fmt: skip
"""Those that tell our virtual servers from others."""


def retire(excluded: Sequence[Cidr]) -> Leftovers:
    """Remove what no connection needs; virtual servers of others and in *excluded* networks stay."""
    removed: list[str] = []
    errors: list[str] = []
    waiting = 0
    if not listing.SERVERS.exists() or not programs.find("ipset"):
        return Leftovers("ipvs")
    try:
        servers = VirtualServers()
    except SyncFailed as error:
        return Leftovers("ipvs", errors=(str(error),))
    try:
        for family in Family:
            try:
                one = _Retirement(family, servers, excluded)
                waiting += one.waiting
                one.perform(removed)
            except (HostError, SyncFailed) as error:
                errors.append(str(error))
    finally:
        servers.close()
    return Leftovers("ipvs", tuple(removed), tuple(errors), waiting)


class _Retirement:
    """One look at one family, and what follows from it."""

    def __init__(self, family: Family, servers: VirtualServers, excluded: Sequence[Cidr]) -> None:
        """Raises HostError or SyncFailed."""
        self._family = family
        self._servers = servers
        self._entries = sets.read(family)
        self._on_device = device.read(family)[0]
        counted = servers.count(family)
        ours = {
            key: items for key, (_, items) in counted.items()
            if is_left(key, self._on_device, self._entries, excluded)
        }  # fmt: skip
        self._verdict = judge(ours, _udp_marks(self._entries), _unfinished(ours))
        self._staying = {key for key in counted if key not in self._verdict.gone}

    @property
    def waiting(self) -> int:
        return self._verdict.waiting

    def perform(self, removed: list[str]) -> None:
        """Do it; *removed* gets a line for each object. Raises HostError or SyncFailed."""
        if names.CLUSTER_IP in self._entries:
            removed += self._remove_rules()
        verdict = self._verdict
        flows = _flows(verdict.datagrams)
        # A datagram that comes from now on begins a flow of the other mode, and one that comes before its
        # virtual server is gone does no harm: what it leaves is deleted as well.
        conntrack.delete_stale_udp(self._family, flows)
        self._servers.write(verdict.operations)
        conntrack.delete_stale_udp(self._family, flows)
        removed += [f"virtual server {key}" for key in verdict.gone]
        needed = needed_addresses(self._staying, self._entries)
        unbound = [address for address in self._on_device if address not in needed]
        device.unbind(unbound, self._family)
        removed += [f"address {format_address(address)} on {names.DEVICE}" for address in unbound]
        listed = self._entries.get(names.IPVS_IPS, {})
        texts = map(format_address, unbound)
        sets.write(self._family, (), [Element(names.IPVS_IPS, text) for text in texts if text in listed])

    def _remove_rules(self) -> list[str]:
        """What decides about new connections, and the sets that only those rules read."""
        removed: list[str] = []
        kept = device_chains(self._family)
        for variant in find_variants():
            tables = Tables(self._family, variant)
            held = rules.read(tables)
            removal = what_to_remove(held, _KEPT_CHAINS)
            if not removal.chains:
                continue
            jumps = [jump for jump in JUMPS if (jump.table, jump.target) in kept]
            text = rules.difference(held, kept, jumps)
            tables.restore(text + "".join(inputs(removal, tables.chains_per_call)))
            removed += [f"{tables.program}: {line}" for line in described(removal)]
        unread = [kind.full_name(self._family) for kind in self._entries if kind not in _KEPT_SETS]
        sets.destroy(unread)
        return removed + [f"ipset {name}" for name in unread]


class Verdict(NamedTuple):
    """What becomes of virtual servers."""

    operations: list[Operation]
    gone: list[ServerKey]
    datagrams: list[ServerKey]
    """Those among them whose flows are to begin anew."""
    waiting: int
    """Connections that the others have."""


def judge(
    servers: Mapping[ServerKey, Sequence[Listed]],
    udp_marks: Collection[int],
    unfinished: Mapping[Destination, int],
) -> Verdict:
    """Which of our *servers* stay for the sake of their connections, without taking new ones.

    *unfinished*: the connections of real servers that may still carry data (see `listing.unfinished`).
    """
    verdict = Verdict([], [], [], 0)
    waiting = 0
    for key, items in servers.items():
        if key.protocol == Protocol.UDP:
            verdict.datagrams.append(key)
        udp = key.protocol == Protocol.UDP or key.mark in udp_marks
        alive = {} if udp else {
            item.where: count for item in items if (count := _connections(item, unfinished))
        }  # fmt: skip
        if not alive:
            verdict.operations.append(DeleteServer(key))
            verdict.gone.append(key)
            continue
        waiting += sum(alive.values())
        for item in items:
            if item.where not in alive:
                verdict.operations.append(DeleteDestination(key, item.where))
            elif item.weight:
                verdict.operations.append(PutDestination(key, item.where, 0, new=False))
    return verdict._replace(waiting=waiting)


def _connections(item: Listed, unfinished: Mapping[Destination, int]) -> int:
    """Those that are open: also with one side that has nothing to say any more, which IPVS calls inactive."""
    return max(item.active, min(item.connections, unfinished.get(item.where, 0)))


def _unfinished(servers: Mapping[ServerKey, Sequence[Listed]]) -> Mapping[Destination, int]:
    if not any(item.inactive for items in servers.values() for item in items):
        return {}
    try:
        with listing.CONNECTIONS.open(encoding="ascii") as lines:
            return listing.unfinished(lines)
    except OSError as error:
        raise HostError("connections of IPVS can't be read", error) from error


def _udp_marks(entries: Entries) -> set[int]:
    return {mark for entry, mark in entries.get(names.SHORT_CIRCUIT, {}).items() if ",udp:" in entry}


def needed_addresses(staying: Collection[ServerKey], entries: Entries) -> set[Address]:
    """The addresses of virtual servers, and of frontends that reach one by its mark."""
    marks = {key.mark for key in staying if key.address is None}
    needed = {key.address for key in staying if key.address is not None}
    for entry, mark in entries.get(names.SHORT_CIRCUIT, {}).items():
        if mark in marks:
            needed.add(parse_address(entry.partition(",")[0]))
    return needed


def _flows(servers: Sequence[ServerKey]) -> StaleFlows:
    """All flows to these: none of the other mode's, which serves them from the next datagram on."""
    vips = {(key.address, key.port): frozenset[Destination]() for key in servers if key.address is not None}
    frontends = frozenset(Frontend(address, Protocol.UDP, port) for address, port in vips)
    return StaleFlows(frontends, vips, {}, frozenset())
