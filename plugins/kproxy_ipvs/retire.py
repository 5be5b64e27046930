"""Retirement: leaving the node to another mode without breaking connections.

The other mode's rules translate new connections before IPVS sees them. Connections through IPVS still need
their virtual server, their real server, and the VIP on the device. Everything else is deleted at once.

UDP flows that conntrack knows bypass the nat rules and remain with IPVS until conntrack forgets them; the
other mode forwards the next datagram. An IPVS connection that ends deletes the conntrack entry with its
addresses and ports (ip_vs_conn_drop_conntrack, ip_vs_nfct.c), and since Linux 5.9 all connections of a real
server end soon after its deletion. Therefore nothing in use may be deleted.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from kproxy_core.contract import (
    Address,
    Cidr,
    Destination,
    Family,
    Frontend,
    HostError,
    Leftovers,
    Protocol,
    format_address,
    parse_address,
)
from kproxy_core.linux import conntrack, programs
from kproxy_core.linux.addresses import default_source_address
from kproxy_core.linux.conntrack import UdpFlow
from kproxy_ipvs import names
from kproxy_ipvs.applied import Entries
from kproxy_ipvs.batch import DeleteDestination, DeleteServer, Operation, PutDestination, RealServer
from kproxy_ipvs.batch import difference as rules_difference
from kproxy_ipvs.cleanup import is_leftover, plan_cleanup
from kproxy_ipvs.kernel import connections, device, sets
from kproxy_ipvs.kernel.connections import Translation
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.names import FILTER
from kproxy_ipvs.skeleton import JUMPS, no_frontend
from kproxy_ipvs.wanted import ServerKey, SetEntry
from kproxy_xtables.removal import describe, restore_inputs
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variants

_KEPT_CHAINS = frozenset({(FILTER, names.FORWARD), (FILTER, names.IPVS_FILTER)})
"""Chains that admit replies, and that protect programs on the node while the device has VIPs."""

_KEPT_SETS = frozenset({
    names.IPVS_IPS, names.SHORT_CIRCUIT, *chain(*names.NODE_PORT_SETS.values())
})  # fmt: skip
"""Sets that identify our virtual servers."""

Frontends = Mapping[int, Collection[Frontend]]
"""The frontends of each mark."""


def retire(excluded: Sequence[Cidr]) -> Leftovers:
    """Delete all objects that no connection needs. Virtual servers in *excluded* networks are kept."""
    removed: list[str] = []
    errors: list[str] = []
    waiting = 0
    if not connections.SERVERS.exists() or not programs.find("ipset"):
        return Leftovers()
    try:
        with VirtualServers() as servers:
            for family in Family:
                try:
                    one = _Retirement(family, servers, excluded)
                    try:
                        removed += one.release_new_connections()
                    except HostError as error:  # The next call tries again.
                        errors.append(str(error))
                    waiting += one.remove_unneeded(removed)
                except HostError as error:
                    errors.append(str(error))
    except HostError as error:
        errors.append(str(error))
    return Leftovers(tuple(removed), tuple(errors), waiting)


class _Retirement:
    def __init__(self, family: Family, servers: VirtualServers, excluded: Sequence[Cidr]) -> None:
        """Read the kernel. Raises HostError."""
        self._family = family
        self._servers = servers
        self._excluded = excluded
        self._entries = sets.read(family)
        self._on_device = device.read(family)[0]

    def release_new_connections(self) -> list[str]:
        """Delete the objects that interfere with the other mode. Return a line for each. Raises HostError."""
        if names.CLUSTER_IP not in self._entries:
            return []  # An earlier call has done it.
        source = default_source_address(self._family)
        if source is not None:
            device.lend_source(self._on_device, source, self._family)
        return self._remove_rules()

    def remove_unneeded(self, removed: list[str]) -> int:
        """Delete unneeded virtual servers and addresses. Return how many connections need the others.

        Append a line for each object to *removed*. Raises HostError.
        """
        counted = self._servers.count(self._family)
        ours = {
            key: items for key, (_, items) in counted.items()
            if is_leftover(key, self._on_device, self._entries, self._excluded)
        }  # fmt: skip
        marked = short_circuits(self._entries)
        operations, waiting = judge(ours, marked, self._in_use(ours, marked))
        self._servers.write(operations)
        deleted = [operation.key for operation in operations if isinstance(operation, DeleteServer)]
        removed += [f"virtual server {key}" for key in deleted]
        kept = counted.keys() - set(deleted)
        needed = {frontend.address for key in kept for frontend in frontends(key, marked)}
        return waiting + self._remove_addresses(self._on_device - needed, removed)

    def _in_use(
        self, servers: Mapping[ServerKey, Sequence[RealServer]], marked: Frontends
    ) -> Counter[Translation]:
        """Count the connections that IPVS calls inactive but that may continue."""
        protocols = {
            frontend.protocol for key, items in servers.items() if any(item.inactive for item in items)
            for frontend in frontends(key, marked)
        }  # fmt: skip
        found: Counter[Translation] = Counter()
        if protocols - {Protocol.UDP}:
            found += connections.count_closing()
        if Protocol.UDP in protocols:
            to = [frontend.address for key in servers for frontend in frontends(key, marked)]
            found += conntrack.read_udp_flows(self._family, frozenset(filter(None, to)), count_untranslated)
        return found

    def _remove_addresses(self, addresses: AbstractSet[Address], removed: list[str]) -> int:
        """Delete *addresses* from the device, except the sources of the node's own connections.

        The node opened those under the other mode's rules while the address was still local. Return their
        number, and append a line for each deleted address to *removed*.
        """
        connected = connections.count_connected_from(addresses, self._family)
        if rest := addresses - connected.keys():  # Unconnected sockets may wait for answers as well.
            connected += conntrack.read_udp_flows(
                self._family, rest,
                lambda flows: Counter(flow.source for flow in flows if flow.source in rest),
            )  # fmt: skip
        unbound = sorted(addresses - connected.keys())
        device.unbind(unbound, self._family)
        removed += [f"address {format_address(address)} on {names.DEVICE}" for address in unbound]
        listed = self._entries.get(names.IPVS_IPS, {})
        texts = map(format_address, unbound)
        sets.write(self._family, (), [SetEntry(names.IPVS_IPS, text) for text in texts if text in listed])
        return connected.total()

    def _remove_rules(self) -> list[str]:
        """Delete the rules for new connections, and the sets that only those rules read."""
        removed: list[str] = []
        kept = {(FILTER, names.IPVS_FILTER): [no_frontend(self._family)]}
        for variant in find_variants():
            tables = Tables(self._family, variant)
            held = tables.chains()
            removal = plan_cleanup(held, _KEPT_CHAINS)
            if not removal.chains:
                continue
            jumps = [jump for jump in JUMPS if jump.target_key in kept]
            text = rules_difference(held, kept, jumps)
            tables.restore(text + "".join(restore_inputs(removal, tables.chains_per_call)))
            removed += [f"{tables.program}: {line}" for line in describe(removal)]
        unread = [kind.full_name(self._family) for kind in self._entries if kind not in _KEPT_SETS]
        for error in sets.destroy(unread).values():
            raise error
        return removed + [f"ipset {name}" for name in unread]


def judge(
    servers: Mapping[ServerKey, Sequence[RealServer]], marked: Frontends, in_use: Mapping[Translation, int]
) -> tuple[list[Operation], int]:
    """Decide which of our *servers* to keep for their connections, without accepting new ones.

    *in_use* counts connections that IPVS calls inactive but that may continue. Return the operations, and the
    number of connections of the virtual servers that are kept.
    """
    operations: list[Operation] = []
    waiting = 0
    for key, items in servers.items():
        reached_by = frontends(key, marked)
        alive: dict[Destination, int] = {}
        for item in items:
            continuing = sum(in_use.get(Translation(frontend, item.where), 0) for frontend in reached_by)
            if count := item.active + min(item.inactive, continuing):
                alive[item.where] = count
        if not alive:
            operations.append(DeleteServer(key))
            continue
        waiting += sum(alive.values())
        for item in items:
            if item.where not in alive:
                operations.append(DeleteDestination(key, item.where))
            elif item.weight:
                operations.append(PutDestination(key, item.where, 0, new=False))
    return operations, waiting


def count_untranslated(flows: Iterable[UdpFlow]) -> Counter[Translation]:
    """Count those UDP *flows* that no other mode's rules translate."""
    return Counter(
        Translation(Frontend(address, Protocol.UDP, port), Destination(*answered_by))
        for _, (address, port), answered_by, translated in flows if not translated
    )  # fmt: skip


def frontends(key: ServerKey, marked: Frontends) -> Collection[Frontend]:
    if key.address is None:
        return marked.get(key.mark, ())
    return (Frontend(key.address, Protocol(key.protocol), key.port),)


def short_circuits(entries: Entries) -> Frontends:
    """Return the frontends by mark, from the set of short circuits."""
    found: dict[int, list[Frontend]] = {}
    for entry, mark in entries.get(names.SHORT_CIRCUIT, {}).items():
        address, _, rest = entry.partition(",")
        protocol, _, port = rest.partition(":")
        frontend = Frontend(parse_address(address), Protocol[protocol.upper()], int(port))
        found.setdefault(mark, []).append(frontend)
    return found
