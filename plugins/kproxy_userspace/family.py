"""One family's relays and portals: what was acknowledged, and how to get from there to what is wanted."""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kproxy_core.backend.api import SyncReport
from kproxy_core.backend.errors import TrustLost
from kproxy_core.host.conntrack.flows import delete_stale_udp
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_userspace.batch import Redirect
from kproxy_userspace.flows import RelayedFlows
from kproxy_userspace.kernel.arrivals import Port, arriving
from kproxy_userspace.kernel.portals import Portals
from kproxy_userspace.kernel.ports import Allocator, Holder, NoPort, hold
from kproxy_userspace.kernel.workers import Workers
from kproxy_userspace.wanted import Portal, RelayName, WantedRelay, wanted_relays
from kproxy_userspace.worker.wire import Serve

log = logging.getLogger("kproxy.userspace")

GRACE_SECONDS = 5.0
"""After a portal has gone, packets that had passed its rule may not be known to connection tracking yet."""

_numbers = itertools.count(1)

Plans = Mapping[ServicePortKey, ServicePlan]
Place = tuple[Protocol, Address | None, int]
"""A port at an address, None: at every one."""


class Relay:
    """One relay that is open, with the port that it has."""

    __slots__ = ("holder", "key", "left", "number", "wanted")

    def __init__(self, key: ServicePortKey, holder: Holder, wanted: WantedRelay) -> None:
        self.key = key
        self.holder = holder
        self.number = next(_numbers)
        self.wanted = wanted
        self.left = 0.0
        """When the last portal to it went, on the monotonic clock."""

    @property
    def port(self) -> Port:
        return Port(self.wanted.protocol, self.holder.port)


class FamilyRelays:
    """All relays of one family; workers and portals follow."""

    def __init__(
        self, family: Family, portals: Portals, workers: Workers, allocator: Allocator,
        listen: Address | None, bind: Address | None,
    ) -> None:
        """*listen*: at the ports of Services, there; *bind*: at any port, there; both None: everywhere."""
        self.family = family
        self._portals = portals
        self._workers = workers
        self._allocator = allocator
        self._listen = listen
        self._bind = bind
        address = listen or bind
        self._address = format_address(family.unspecified if address is None else address)
        self._relays: dict[ServicePortKey, dict[RelayName, Relay]] = {}
        self._applied: dict[ServicePortKey, frozenset[Redirect]] = {}
        """What the kernel holds."""
        self._held: dict[ServicePortKey, dict[Place, Holder | None]] = {}
        """Ports that nobody else on this node may take; None: the address is not this node's."""
        self._unserved: dict[ServicePortKey, str] = {}
        self._closing: list[Relay] = []
        """What goes as soon as no portal leads to it."""
        self._leaving: list[Relay] = []
        """No portal leads to these, but somebody may be on the way: their ports must be nobody else's."""
        self._writing = threading.Lock()
        """For the portals, which are what was applied but while somebody has this, and for what leaves."""
        self._withdrawn = False
        self._node: NodeView | None = None
        """The node as of the last full sync; None: there was none, or it failed."""

    def must_resync(self, node: NodeView) -> bool:
        """Return whether the node has changed: every portal may depend on its addresses."""
        return node != self._node

    def resync(self, node: NodeView, plans: Plans) -> SyncReport:
        """Bring everything to *plans*, believing nothing."""
        gone = dict.fromkeys(self._relays.keys() - plans.keys())
        self._node = None
        report = self._bring(node, {**gone, **plans}, anew=True)
        self._node = node
        return report

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Bring only *changed* to what they are now."""
        return self._bring(node, changed, anew=False)

    @property
    def unserved(self) -> int:
        """Service ports that are not served, or not at all of their places."""
        return len(self._unserved)

    def intact(self) -> bool:
        """Whether the portals are there. From any thread; raises HostError."""
        with self._writing:
            return not self._portals.differences(_all(self._applied))

    def ports(self, key: ServicePortKey) -> frozenset[int]:
        """Where relays take what is sent to a service port."""
        relays = self._relays.get(key, {}).values()
        return frozenset(relay.holder.port for relay in relays if relay.wanted.endpoints)

    def relay_at(self, protocol: Protocol, port: int) -> WantedRelay | None:
        """Return the relay that listens at a port of the node. From any thread."""
        for relays in list(self._relays.values()):
            for relay in list(relays.values()):
                if (relay.wanted.protocol, relay.holder.port) == (protocol, port):
                    return relay.wanted
        return None

    def settle(self) -> None:
        """Close what nobody is on the way to any more. From any thread; raises HostError or SyncFailed."""
        before = time.monotonic() - GRACE_SECONDS
        with self._writing:
            leaving = [relay for relay in self._leaving if relay.left <= before]
        reached = arriving(self.family, {relay.port for relay in leaving})
        free = [relay for relay in leaving if relay.port not in reached]
        self._workers.stop_accepting(relay.number for relay in free)
        with self._writing:
            self._leaving = [relay for relay in self._leaving if relay not in free]
        self._release(free)

    def withdraw(self) -> list[str]:
        """Have no portal lead to a relay, once: from then on they are somebody else's. Says what there was.

        Raises HostError.
        """
        if self._withdrawn:
            return []
        with self._writing:
            removed = self._portals.withdraw()
            self._withdrawn = True
        self._let_go()
        return removed

    def arriving(self) -> Counter[Protocol]:
        """How many clients of each protocol still get to relays though portals were withdrawn.

        Those of TCP are not accepted yet. Raises HostError.
        """
        listening = {relay.port for relay in self._all_relays() if relay.wanted.endpoints}
        found: Counter[Protocol] = Counter()
        for port, clients in arriving(self.family, listening).items():
            found[port.protocol] += clients
        return found

    def accept_no_more(self) -> None:
        """Stop listening; and UDP clients that get no answer here begin anew with who serves now.

        Raises HostError or SyncFailed.
        """
        self._workers.stop_accepting(relay.number for relay in self._all_relays())
        refusing = {relay.holder.port for relay in self._all_relays() if not relay.wanted.endpoints}
        self._forget_flows(redirect for redirect in _all(self._applied) if redirect.port in refusing)

    def leave(self) -> None:
        """Have nothing lead here any more: portals and flows would lead to whoever has the ports next."""
        try:
            self.withdraw()
            self._forget_flows(_all(self._applied))
        except HostError as error:
            log.warning("portals or flows stay", extra={"fields": {"error": str(error)}})

    def close(self) -> None:
        """Let go of all ports."""
        for relay in self._all_relays():
            relay.holder.close()
        self._let_go()

    def _forget_flows(self, of: Iterable[Redirect]) -> None:
        """Have UDP clients begin anew with whoever serves now. Raises HostError."""
        delete_stale_udp(self.family, RelayedFlows.of(of))

    def _all_relays(self) -> list[Relay]:
        return [*(relay for relays in self._relays.values() for relay in relays.values()), *self._leaving]

    def _let_go(self) -> None:
        """The node's ports are anybody's: perhaps the next backend's of this mode."""
        held, self._held = self._held, {}
        for holder in [holder for places in held.values() for holder in places.values()]:
            if holder is not None:
                holder.close()

    def _bring(
        self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None], *, anew: bool
    ) -> SyncReport:
        orders: dict[int, Serve | None] = {}
        redirects: dict[ServicePortKey, frozenset[Redirect]] = {}
        wanted = {
            key: {} if plan is None else wanted_relays(plan, node, self._listen)
            for key, plan in changed.items()
        }
        for key, relays in wanted.items():  # All of them first: others may want the same ports.
            self._give_up(key, relays)
        operations = self._close_relays() if self._listen is not None else 0
        for key, relays in wanted.items():
            if changed[key] is not None and key.protocol is Protocol.SCTP and key not in self._applied:
                log.warning("SCTP is not relayed", extra={"fields": {"service_port": str(key)}})
            for name, want in relays.items():
                relay = self._opened(name, want)
                if relay is not None:
                    orders[relay.number] = self._serve(relay)
            redirects[key] = frozenset(self._redirects(key))
        failures = self._workers.serve(orders)
        with self._writing:
            operations += self._redirect(redirects, anew=anew)
        operations += self._close_relays()
        if failures:  # Perhaps also of the other family, which hears of its own at its turn.
            for relay in self._all_relays():
                if relay.number in failures:
                    self._unserved[relay.key] = f"a relay can't listen: {failures[relay.number]}"
        return SyncReport(operations, unserved=dict(self._unserved))

    def _give_up(self, key: ServicePortKey, wanted: Mapping[RelayName, WantedRelay]) -> None:
        """Let go of what a service port no longer wants, but for what clients may be on the way to."""
        self._unserved.pop(key, None)
        relays = self._relays.get(key, {})
        self._closing += [relays.pop(name) for name in list(relays) if name not in wanted]
        if not relays:
            self._relays.pop(key, None)
        places = {_place(portal) for want in wanted.values() for portal in want.portals}
        held = self._held.get(key, {})
        for place in held.keys() - places:
            holder = held.pop(place)
            if holder is not None:
                holder.close()
        if not held:
            self._held.pop(key, None)

    def _close_relays(self) -> int:
        """Close what no portal leads to any more; how many those are.

        What another relay of the same service port replaces listens while somebody is on the way to it.
        """
        closing = self._closing
        gone = [relay for relay in closing if not self._replaced(relay)]
        self._workers.serve({relay.number: None for relay in gone})
        self._closing = []
        for relay in gone:
            relay.wanted = replace(relay.wanted, endpoints=())
        if self._listen is not None:
            self._release(closing)
            return len(closing)
        now = time.monotonic()
        for relay in closing:
            relay.left = now
        with self._writing:
            self._leaving += closing
        return len(closing)

    def _replaced(self, relay: Relay) -> bool:
        """Whether portals lead from *relay*, which closes, to another that serves."""
        others = self._relays.get(relay.key, {}).values() if self._listen is None else ()
        return bool(relay.wanted.endpoints) and any(other.wanted.endpoints for other in others)

    def _release(self, relays: Iterable[Relay]) -> None:
        for relay in relays:
            self._allocator.release(self.family, relay.wanted.protocol, relay.holder)

    def _redirect(self, redirects: dict[ServicePortKey, frozenset[Redirect]], *, anew: bool) -> int:
        """Make the portals of these service ports so; returns how many that changes."""
        deletes: list[Redirect] = []
        adds: list[Redirect] = []
        for key, wanted in redirects.items():
            known = self._applied.get(key, frozenset())
            deletes += known - wanted
            adds += wanted - known
        operations = len(deletes) + len(adds)
        if anew:
            everything = sorted(_all({**self._applied, **redirects}), key=str)
            operations = self._portals.differences(everything)
            if operations:
                self._portals.rewrite(everything)
        elif deletes or adds:
            try:
                self._portals.change(deletes, adds)
            except HostError as error:
                raise TrustLost(str(error)) from error
        for key, wanted in redirects.items():
            if wanted:
                self._applied[key] = wanted
            else:
                self._applied.pop(key, None)
        return operations

    def _opened(self, name: RelayName, wanted: WantedRelay) -> Relay | None:
        """The relay of that name, as it is wanted now; None if there is no port for it."""
        relay = self._relays.get(name.key, {}).get(name)
        if relay is None:
            address = self._listen or self._bind
            try:
                holder = self._allocator.open(self.family, wanted.protocol, address, name.port)
            except NoPort as error:
                self._unserved[name.key] = str(error)
                return None
            if self._listen is not None:
                log.info("listening", extra={"fields": {
                    "service_port": str(name.key), "port": name.port,
                    "at": format_socket(self._listen, holder.port), "protocol": wanted.protocol.name,
                }})
            relay = Relay(name.key, holder, wanted)
            self._relays.setdefault(name.key, {})[name] = relay
        relay.wanted = wanted
        return relay

    def _serve(self, relay: Relay) -> Serve:
        wanted = relay.wanted
        return Serve(relay.number, wanted.protocol is Protocol.UDP, self._address, relay.holder.port,
                     wanted.endpoints, wanted.affinity_seconds)

    def _redirects(self, key: ServicePortKey) -> Iterator[Redirect]:
        """The portals of one service port, but for those whose port on this node somebody else has."""
        for relay in self._relays.get(key, {}).values():
            for portal in relay.wanted.portals:
                held = self._held.setdefault(key, {})
                place = _place(portal)
                if place not in held:
                    try:
                        held[place] = hold(self.family, *place)
                    except NoPort as error:
                        self._unserved[key] = str(error)
                        continue
                yield Redirect(portal, relay.holder.port, self._bind)


def _all(applied: Mapping[ServicePortKey, frozenset[Redirect]]) -> list[Redirect]:
    return [redirect for found in list(applied.values()) for redirect in found]


def _place(portal: Portal) -> Place:
    return portal.protocol, portal.address, portal.port
