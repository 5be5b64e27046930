"""Relays and portals of one IP family, and the steps that bring them to the plans."""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from kproxy_core.contract import (
    Family,
    Frontend,
    HostError,
    IsRemoved,
    NodeView,
    Protocol,
    ServicePlan,
    ServicePortKey,
    SyncReport,
    TrustLost,
    format_address,
    format_socket,
)
from kproxy_core.linux.relay.orders import Serve
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_userspace.applied import Applied, LocalPort, Relay
from kproxy_userspace.kernel.arrivals import arriving, delete_flows
from kproxy_userspace.kernel.portals import Portals
from kproxy_userspace.kernel.ports import NoPort, RelayPorts, Reservations
from kproxy_userspace.settings import Settings
from kproxy_userspace.wanted import Redirect, RelayName, Wanted, wanted

log = logging.getLogger("kproxy.userspace")

GRACE_SECONDS = 5.0
"""Seconds after the deletion of a portal in which conntrack may lack clients that its rule matched."""

_numbers = itertools.count(1)


class FamilyState:
    """All relays and portals of one family."""

    def __init__(self, family: Family, portals: Portals, workers: WorkerPool, settings: Settings) -> None:
        self.family = family
        self._portals = portals
        self._workers = workers
        self._ports = RelayPorts(family, settings.port_range)
        self._listen = settings.listen
        self._bind = settings.bind_in(family)
        self._counted = settings.counts_connections
        self._reservations = Reservations(family)
        self._applied = Applied()
        self.unserved: dict[ServicePortKey, str] = {}
        """Service ports that are not, or only partly, served, with the reason."""
        self._writing = threading.Lock()
        """Guards the portals in the kernel and in `_applied`, and the departing relays."""
        self._withdrawn = False
        self._is_cleared = False
        self._takes_over = False
        """UDP flows may go to relays of an earlier process, whose ports are bound again."""
        self._node: NodeView | None = None
        """Node of the last acknowledged resync; None: the next sync must be a resync."""

    def must_resync(self, node: NodeView) -> bool:
        """Return whether the node has changed: every portal may depend on its addresses."""
        return node != self._node

    def resync(self, node: NodeView, plans: Mapping[ServicePortKey, ServicePlan]) -> SyncReport:
        """Bring all relays to *plans*, and reconcile the portals from a fresh read of the kernel."""
        deleted = dict.fromkeys(self._applied.relays.keys() - plans.keys())
        self._node = None
        if not self._is_cleared:
            # The portals of an earlier process would redirect clients to whichever relay binds their port
            # again.
            with self._writing:
                self._takes_over = bool(self._portals.withdraw())
            self._is_cleared = True
        report = self._bring(node, {**deleted, **plans}, is_resync=True)
        self._node = node
        return report

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Bring only the *changed* service ports to their plans. O(changed)."""
        return self._bring(node, changed, is_resync=False)

    def is_intact(self) -> bool:
        """Return whether the portals exist. From any thread; raises HostError."""
        with self._writing:
            return not self._portals.differences(self._applied.all_portals())

    def listening_ports(self, key: ServicePortKey) -> frozenset[int]:
        """Return the ports at which relays accept the traffic of a service port."""
        relays = self._applied.relays.get(key, {}).values()
        return frozenset(relay.port for relay in relays if relay.is_listening)

    def refusing_ports(self) -> frozenset[int]:
        """Return the ports of UDP relays without endpoints. From any thread."""
        return frozenset(
            relay.port for relay in self._applied.current_relays()
            if relay.wanted.protocol is Protocol.UDP and not relay.is_listening)

    def relays_by_port(self) -> dict[LocalPort, Relay]:
        """Return the relays by their ports of the node. From any thread."""
        return {relay.local_port: relay for relay in self._applied.current_relays()}

    def reset_connections(self, is_removed: IsRemoved) -> int:
        """Reset the connections of relays to removed endpoints. Return their number. From any thread."""
        keys = {relay.number: relay.name.key for relay in self._applied.current_relays()}
        return self._workers.reset_removed(keys, is_removed)

    def close_departed(self) -> None:
        """Close departing relays to which no client is connecting. From any thread.

        Raises HostError.
        """
        before = time.monotonic() - GRACE_SECONDS
        with self._writing:
            departing = [relay for relay, since in self._applied.departing.items() if since <= before]
        reached = arriving(self.family, {relay.local_port for relay in departing})
        departed = [relay for relay in departing if relay.local_port not in reached]
        self._workers.stop_accepting(relay.number for relay in departed)
        with self._writing:
            self._applied.acknowledge_departed(departed)
        self._release(departed)

    # Leaving the node to another mode ------------------------------------------------------

    def withdraw(self) -> list[str]:
        """Delete all portals, once: later portals belong to another instance. Return a line for each object.

        Raises HostError.
        """
        if self._withdrawn:
            return []
        with self._writing:
            removed = self._portals.withdraw()
            self._withdrawn = True
        self._reservations.release_all()
        return removed

    def arriving(self, protocols: Collection[Protocol]) -> Counter[Protocol]:
        """Return how many clients of each of these *protocols* are connecting to a relay. Raises HostError.

        Accepted TCP clients are not counted.
        """
        listening = {
            relay.local_port for relay in self._applied.all_relays()
            if relay.is_listening and relay.wanted.protocol in protocols
        }  # fmt: skip
        found: Counter[Protocol] = Counter()
        for port, clients in arriving(self.family, listening).items():
            found[port.protocol] += clients
        return found

    def stop_accepting(self) -> None:
        """Accept no more TCP clients, and delete the flows of UDP clients that get no answer here.

        Raises HostError.
        """
        relays = self._applied.all_relays()
        self._workers.stop_accepting(
            relay.number for relay in relays if relay.wanted.protocol is Protocol.TCP)
        refusing = {relay.port for relay in relays if not relay.is_listening}
        delete_flows(self.family, (each for each in self._applied.all_portals() if each.port in refusing))

    def disconnect(self) -> None:
        """Delete portals and UDP flows, which would reach the next process that binds our ports."""
        try:
            self.withdraw()
            delete_flows(self.family, self._applied.all_portals())
        except HostError as error:
            log.warning("could not delete portals or flows", extra={"fields": {"error": str(error)}})

    def close(self) -> None:
        self._release(self._applied.all_relays())
        self._reservations.release_all()

    # Synchronisation -----------------------------------------------------------------------

    def _bring(
        self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None], *, is_resync: bool
    ) -> SyncReport:
        relays_of = {
            key: {} if plan is None else wanted(plan, node, self._listen, counted=self._counted)
            for key, plan in changed.items()
        }
        unserved = {key: reason for key, reason in self.unserved.items() if key not in changed}
        # Everything is released before anything is bound: ports may move between service ports.
        for key, relays in relays_of.items():
            self._reservations.keep_only(key, {p.frontend for want in relays.values() for p in want.portals})
        surplus = self._applied.surplus(relays_of)
        operations = self._close_relays(surplus) if self._listen is not None else 0
        opened: list[Relay] = []
        for key, relays in relays_of.items():
            for name, want in relays.items():
                try:
                    opened.append(self._relay(name, want))
                except NoPort as error:
                    unserved[key] = str(error)
        if self._takes_over:
            delete_flows(self.family, [
                Redirect(portal, relay.port) for relay in opened for portal in relay.wanted.portals])
            self._takes_over = False
        failures = self._workers.serve({relay.number: self._order(relay) for relay in opened})
        self._applied.acknowledge_relays(opened)
        portals = dict.fromkeys(changed, frozenset[Redirect]())
        for relay in opened:
            portals[relay.name.key] |= frozenset(self._reserved_portals(relay, node, unserved))
        unfinished = frozenset[ServicePortKey]()
        with self._writing:
            if is_resync:
                operations += self._rewrite(portals)
            else:
                every, portals = portals, self._applied.part(portals)
                unfinished = frozenset(key for key in portals if portals[key] != every[key])
                operations += self._change(portals)
            self._applied.acknowledge(portals)
        if self._listen is None:
            operations += self._close_relays(surplus)
        for relay in self._applied.all_relays():
            if relay.number in failures:  # The next sync of the other family reports its own.
                unserved[relay.name.key] = f"a relay does not serve it: {failures[relay.number]}"
        self.unserved = unserved
        return SyncReport(
            operations, unserved=dict(unserved), unfinished=unfinished, degraded=self._workers.problem)

    def _relay(self, name: RelayName, want: Wanted) -> Relay:
        """Return a wanted relay with its port, which is bound if necessary. Raises NoPort."""
        held = self._applied.relays.get(name.key, {})
        if name in held:
            return held[name]._replace(wanted=want)
        port = self._ports.open(Frontend(self._listen or self._bind, want.protocol, name.port))
        number = next(_numbers)
        relay = Relay(number, name, port, want, next((other.service_port for other in held.values()), number))
        self._applied.acknowledge_relays([relay.not_listening()])
        if self._listen is not None:
            log.info("listening", extra={"fields": {
                "service_port": str(name.key), "port": name.port,
                "at": format_socket(self._listen, port), "protocol": want.protocol.name,
            }})  # fmt: skip
        return relay

    def _order(self, relay: Relay) -> Serve:
        address = self._listen or self._bind or self.family.unspecified
        want = relay.wanted
        dialled, frontend = want.frontend, None
        if dialled is not None:
            frontend = dialled.address, int(dialled.protocol), dialled.port
        return Serve(relay.number, relay.service_port, want.protocol is Protocol.UDP, format_address(address),
                     relay.port, want.endpoints, want.affinity_seconds, frontend, want.resting,
                     want.hash_by)  # fmt: skip

    def _reserved_portals(
        self, relay: Relay, node: NodeView, unserved: dict[ServicePortKey, str]
    ) -> Iterator[Redirect]:
        """Yield the portals of *relay* except those whose port another program has."""
        for portal in relay.wanted.portals:
            on_loopback = node.relays_node_ports and portal.address in (None, self.family.loopback)
            try:
                self._reservations.reserve(relay.name.key, portal.frontend, beside_relays=on_loopback)
            except NoPort as error:
                unserved[relay.name.key] = str(error)
            else:
                yield Redirect(portal, relay.port, self._bind)

    def _rewrite(self, portals: Mapping[ServicePortKey, frozenset[Redirect]]) -> int:
        """Write all *portals* if the kernel's differ. Return the number of differences."""
        redirects = sorted(itertools.chain.from_iterable(portals.values()), key=str)
        if operations := self._portals.differences(redirects):
            self._portals.rewrite(redirects)
        return operations

    def _change(self, portals: Mapping[ServicePortKey, frozenset[Redirect]]) -> int:
        """Write the difference to the *portals* of some service ports. Return the number of operations."""
        deletes, adds = self._applied.difference(portals)
        if deletes or adds:
            try:
                self._portals.change(deletes, adds, lambda: self._applied.portals_after(portals))
            except HostError as error:
                raise TrustLost(str(error)) from error
        return len(deletes) + len(adds)

    def _close_relays(self, surplus: Collection[Relay]) -> int:
        """Close relays without portals. Return their number.

        A relay that another one of its service port replaces listens while clients are connecting to it.
        """
        departing = [
            relay if self._is_replaced(relay, surplus) else relay.not_listening() for relay in surplus]
        self._workers.serve({relay.number: None for relay in departing if not relay.is_listening})
        if self._listen is not None:
            self._applied.acknowledge_closed(surplus, {})
            self._release(surplus)
        else:
            with self._writing:
                self._applied.acknowledge_closed(surplus, dict.fromkeys(departing, time.monotonic()))
        return len(surplus)

    def _is_replaced(self, relay: Relay, surplus: Collection[Relay]) -> bool:
        """Return whether the clients of *relay* are redirected to another relay that listens."""
        if self._listen is not None or not relay.is_listening:
            return False
        others = self._applied.relays.get(relay.name.key, {}).values()
        return any(other.is_listening for other in others if other not in surplus)

    def _release(self, relays: Iterable[Relay]) -> None:
        for relay in relays:
            self._ports.release(relay.wanted.protocol, relay.port)
