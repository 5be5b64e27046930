"""Leaving the node to another mode without ending connections.

That mode's rules decide about new connections before IPVS sees them: a packet to a VIP has another
destination by then. Connections that go through IPVS still need their virtual server, their real server, and
the VIP on our device. Everything else goes at once.

Rules of nat are not asked about a flow that connection tracking knows. So those of UDP stay with IPVS, too,
until connection tracking forgets them; the next datagram is the other mode's. A connection of IPVS that ends
takes what is tracked under its addresses and ports along (ip_vs_conn_drop_conntrack, ip_vs_nfct.c), and all
of a real server end soon after it is deleted (since Linux 5.9): hence nothing that is in use may be deleted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from kproxy_core.backend.api import Leftovers
from kproxy_core.host import programs
from kproxy_core.host.conntrack import flows as conntrack
from kproxy_core.host.conntrack.flows import Flow
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.addresses import default_source_address
from kproxy_core.model.address import Address, Cidr, Family, Protocol, format_address, parse_address
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries
from kproxy_ipvs.batch.rules import difference as rules_difference
from kproxy_ipvs.batch.servers import DeleteDestination, DeleteServer, Listed, Operation, PutDestination
from kproxy_ipvs.cleanup import is_left, what_to_remove
from kproxy_ipvs.kernel import device, listing, rules, sets
from kproxy_ipvs.kernel.listing import Translation
from kproxy_ipvs.kernel.virtual_servers import VirtualServers
from kproxy_ipvs.names import FILTER
from kproxy_ipvs.skeleton import JUMPS, no_frontend
from kproxy_ipvs.wanted import Element, ServerKey
from kproxy_xtables.removal import describe, restore_inputs
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variants

T = TypeVar("T")

_KEPT_CHAINS = frozenset({(FILTER, names.FORWARD), (FILTER, names.IPVS_FILTER)})
"""Answers are forwarded, and VIPs stay on the device."""

_KEPT_SETS = frozenset({
    names.IPVS_IPS, names.SHORT_CIRCUIT, *(kind for kinds in names.NODE_PORT_SETS.values() for kind in kinds)
})  # fmt: skip
"""Those that tell our virtual servers from others."""

Frontends = Mapping[int, Collection[Frontend]]
"""What leads to a virtual server with a mark."""


def retire(excluded: Sequence[Cidr]) -> Leftovers:
    """Remove what no connection needs; virtual servers of others and in *excluded* networks stay."""
    removed: list[str] = []
    errors: list[str] = []
    waiting = 0
    if not listing.SERVERS.exists() or not programs.find("ipset"):
        return Leftovers("ipvs")
    try:
        servers = VirtualServers()
    except HostError as error:
        return Leftovers("ipvs", errors=(str(error),))
    try:
        for family in Family:
            try:
                one = _Retirement(family, servers, excluded)
                try:
                    removed += one.end_new_connections()
                except HostError as error:  # The next call tries again.
                    errors.append(str(error))
                waiting += one.remove_unneeded(removed)
            except HostError as error:
                errors.append(str(error))
    finally:
        servers.close()
    return Leftovers("ipvs", tuple(removed), tuple(errors), waiting)


class _Retirement:
    """One look at one family, and what follows from it."""

    def __init__(self, family: Family, servers: VirtualServers, excluded: Sequence[Cidr]) -> None:
        """Raises HostError."""
        self._family = family
        self._servers = servers
        self._excluded = excluded
        self._entries = sets.read(family)
        self._on_device = device.read(family)[0]

    def end_new_connections(self) -> list[str]:
        """Remove what would meddle with the other mode's; returns a line for each object.

        Raises HostError.
        """
        if names.CLUSTER_IP not in self._entries:
            return []  # It is done.
        source = default_source_address(self._family)
        if source is not None:
            device.lend_source(self._on_device, source, self._family)
        return self._remove_rules()

    def remove_unneeded(self, removed: list[str]) -> int:
        """Remove virtual servers and addresses; returns for how many connections' sake others stay.

        *removed* gets a line for each object. Raises HostError.
        """
        counted = self._servers.count(self._family)
        ours = {
            key: items for key, (_, items) in counted.items()
            if is_left(key, self._on_device, self._entries, self._excluded)
        }  # fmt: skip
        marked = short_circuits(self._entries)
        verdict = judge(ours, marked, self._in_use(ours, marked))
        self._servers.write(verdict.operations)
        removed += [f"virtual server {key}" for key in verdict.gone]
        staying = counted.keys() - set(verdict.gone)
        needed = {frontend.address for key in staying for frontend in frontends(key, marked)}
        return verdict.waiting + self._remove_addresses(self._on_device - needed, removed)

    def _in_use(
        self, servers: Mapping[ServerKey, Sequence[Listed]], marked: Frontends
    ) -> Counter[Translation]:
        """What `judge` has to know about those that IPVS calls inactive."""
        protocols = {
            frontend.protocol for key, items in servers.items() if any(item.inactive for item in items)
            for frontend in frontends(key, marked)
        }  # fmt: skip
        found: Counter[Translation] = Counter()
        if protocols - {Protocol.UDP}:
            found += _twice(lambda: listing.closing(_lines(listing.CONNECTIONS)))
        if Protocol.UDP in protocols:
            to = [frontend.address for key in servers for frontend in frontends(key, marked)]
            found += conntrack.read_udp_flows(self._family, frozenset(filter(None, to)), through_ipvs)
        return found

    def _remove_addresses(self, addresses: AbstractSet[Address], removed: list[str]) -> int:
        """Take *addresses* off the device, but for those that the node's own connections come from.

        It began them when the other mode had its rules already, but the address was local.
        """
        sockets = listing.SOCKETS[self._family]
        connected = _twice(
            lambda: listing.connected_from(addresses, chain.from_iterable(map(_lines, sockets))))
        if waiting := addresses - connected.keys():  # Sockets that are not connected wait for answers, too.
            connected += conntrack.read_udp_flows(
                self._family, waiting,
                lambda flows: Counter(flow.source for flow in flows if flow.source in waiting),
            )  # fmt: skip
        unbound = sorted(addresses - connected.keys())
        device.unbind(unbound, self._family)
        removed += [f"address {format_address(address)} on {names.DEVICE}" for address in unbound]
        listed = self._entries.get(names.IPVS_IPS, {})
        texts = map(format_address, unbound)
        sets.write(self._family, (), [Element(names.IPVS_IPS, text) for text in texts if text in listed])
        return connected.total()

    def _remove_rules(self) -> list[str]:
        """What decides about new connections, and the sets that only those rules read."""
        removed: list[str] = []
        kept = {(FILTER, names.IPVS_FILTER): [no_frontend(self._family)]}
        for variant in find_variants():
            tables = Tables(self._family, variant)
            held = rules.read(tables)
            removal = what_to_remove(held, _KEPT_CHAINS)
            if not removal.chains:
                continue
            jumps = [jump for jump in JUMPS if (jump.table, jump.target) in kept]
            text = rules_difference(held, kept, jumps)
            tables.restore(text + "".join(restore_inputs(removal, tables.chains_per_call)))
            removed += [f"{tables.program}: {line}" for line in describe(removal)]
        unread = [kind.full_name(self._family) for kind in self._entries if kind not in _KEPT_SETS]
        for error in sets.destroy(unread).values():
            raise error
        return removed + [f"ipset {name}" for name in unread]


class Verdict(NamedTuple):
    """What becomes of virtual servers."""

    operations: list[Operation]
    gone: list[ServerKey]
    waiting: int
    """Connections that the others have."""


def judge(
    servers: Mapping[ServerKey, Sequence[Listed]], marked: Frontends, in_use: Mapping[Translation, int]
) -> Verdict:
    """Which of our *servers* stay for the sake of their connections, without taking new ones.

    *in_use*: how many of those that IPVS calls inactive may go on (`listing.closing`, `through_ipvs`).
    """
    operations: list[Operation] = []
    gone: list[ServerKey] = []
    waiting = 0
    for key, items in servers.items():
        reached_by = frontends(key, marked)
        alive: dict[Destination, int] = {}
        for item in items:
            going_on = sum(in_use.get(Translation(frontend, item.where), 0) for frontend in reached_by)
            if count := item.active + min(item.inactive, going_on):
                alive[item.where] = count
        if not alive:
            operations.append(DeleteServer(key))
            gone.append(key)
            continue
        waiting += sum(alive.values())
        for item in items:
            if item.where not in alive:
                operations.append(DeleteDestination(key, item.where))
            elif item.weight:
                operations.append(PutDestination(key, item.where, 0, new=False))
    return Verdict(operations, gone, waiting)


def through_ipvs(flows: Iterable[Flow]) -> Counter[Translation]:
    """How many of *flows* are not another mode's."""
    found: Counter[Translation] = Counter()
    for flow in flows:
        if not flow.translated:
            address, port = flow.destination
            found[Translation(Frontend(address, Protocol.UDP, port), Destination(*flow.answered_by))] += 1
    return found


def frontends(key: ServerKey, marked: Frontends) -> Collection[Frontend]:
    """What leads to a virtual server."""
    if key.address is None:
        return marked.get(key.mark, ())
    return (Frontend(key.address, Protocol(key.protocol), key.port),)


def short_circuits(entries: Entries) -> Frontends:
    """What the set of short circuits says."""
    found: dict[int, list[Frontend]] = {}
    for entry, mark in entries.get(names.SHORT_CIRCUIT, {}).items():
        address, _, rest = entry.partition(",")
        protocol, _, port = rest.partition(":")
        frontend = Frontend(parse_address(address), Protocol[protocol.upper()], int(port))
        found.setdefault(mark, []).append(frontend)
    return found


def _twice(read: Callable[[], Counter[T]]) -> Counter[T]:
    """What *read* counts in /proc, where some are passed over when others end at the same time."""
    return read() | read()


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="ascii") as lines:
            yield from lines
    except OSError as error:
        raise HostError(f"{path} can't be read", error) from error
