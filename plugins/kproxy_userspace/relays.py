"""One family's relays and portals: what was acknowledged, and how to get from there to what is wanted."""

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping

from kproxy_core.backend.api import SyncReport
from kproxy_core.backend.errors import SyncFailed, TrustLost
from kproxy_core.host.conntrack import delete_stale_udp
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Address, Family, Protocol, format_address, format_socket
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_userspace.batch import Redirect
from kproxy_userspace.flows import RelayedFlows
from kproxy_userspace.kernel import Portals
from kproxy_userspace.ports import Allocator, Holder, NoPort, hold
from kproxy_userspace.render import Portal, RelayName, WantedRelay, wanted_relays
from kproxy_userspace.wire import Serve
from kproxy_userspace.workers import Workers

log = logging.getLogger("kproxy.userspace")

_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}
_numbers = itertools.count(1)

Plans = Mapping[ServicePortKey, ServicePlan]
Place = tuple[Protocol, Address | None, int]
"""A port at an address, None: at every one."""


class Relay:
    """One relay that is open, with the port that it has."""

    __slots__ = ("holder", "number", "wanted")

    def __init__(self, holder: Holder, wanted: WantedRelay) -> None:
        self.holder = holder
        self.number = next(_numbers)
        self.wanted = wanted


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
        self._address = _ANY[family] if address is None else format_address(address)
        self._relays: dict[ServicePortKey, dict[RelayName, Relay]] = {}
        self._applied: dict[ServicePortKey, frozenset[Redirect]] = {}
        """What the kernel holds."""
        self._held: dict[ServicePortKey, dict[Place, Holder | None]] = {}
        """Ports that nobody else on this node may take; None: the address is not this node's."""
        self._unserved: set[RelayName] = set()
        self._closing: list[Relay] = []
        """What goes as soon as no portal leads to it."""
        self._writing = threading.Lock()
        """The portals are what was applied, but while somebody has this."""
        self._withdrawn = False

    def resync(self, node: NodeView, plans: Plans) -> SyncReport:
        """Bring everything to *plans*, believing nothing."""
        gone = dict.fromkeys(self._relays.keys() - plans.keys())
        return self._bring(node, {**gone, **plans}, anew=True)

    def change(self, node: NodeView, changed: Mapping[ServicePortKey, ServicePlan | None]) -> SyncReport:
        """Bring only *changed* to what they are now."""
        return self._bring(node, changed, anew=False)

    @property
    def unserved(self) -> int:
        """Service ports that want a relay and have none."""
        return len(self._unserved)

    def intact(self) -> bool:
        """Whether the portals are there. From any thread; raises HostError."""
        with self._writing:
            return not self._portals.differences(_all(self._applied))

    def withdraw(self) -> list[str]:
        """Remove the portals, once: from then on they are somebody else's. Says what there was.

        Raises HostError.
        """
        if self._withdrawn:
            return []
        with self._writing:
            removed = self._portals.remove(dry_run=False)
            self._withdrawn = True
        self._let_go()
        return removed

    def forget_flows(self) -> None:
        """Have UDP clients of portals that were withdrawn begin anew with whoever serves now.

        Raises HostError.
        """
        delete_stale_udp(self.family, RelayedFlows.of(_all(self._applied)))

    def close(self) -> None:
        """Let go of all ports. Portals and flows go too: they would lead to whoever has the ports next."""
        try:
            self.withdraw()
            if self._applied:
                self.forget_flows()
        except HostError as error:
            log.warning("portals or flows stay", extra={"fields": {"error": str(error)}})
        for relay in [relay for relays in self._relays.values() for relay in relays.values()]:
            relay.holder.close()
        self._let_go()

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
        for key, plan in changed.items():
            wanted = {} if plan is None else wanted_relays(plan, node, self._listen)
            if plan is not None and key.protocol is Protocol.SCTP and key not in self._applied:
                log.warning("SCTP is not relayed", extra={"fields": {"service_port": str(key)}})
            relays = self._relays.setdefault(key, {})
            self._closing += [relays.pop(name) for name in list(relays) if name not in wanted]
            self._unserved = {name for name in self._unserved if name.key != key}
            for name, want in wanted.items():
                relay = relays.get(name) or self._open(name, want)
                if relay is None:
                    self._unserved.add(name)
                else:
                    relay.wanted = want
                    relays[name] = relay
                    orders[relay.number] = self._serve(relay)
            if not relays:
                del self._relays[key]
        for key in changed:  # Before others ask for the same ports: they may have gone from one to the other.
            self._give_up_places(key)
        redirects = {key: frozenset(self._redirects(key)) for key in changed}
        failures = self._workers.serve(orders)
        with self._writing:
            operations = self._redirect(redirects, anew=anew)
        closing = self._closing
        self._workers.serve({relay.number: None for relay in closing})
        for relay in closing:
            self._allocator.release(self.family, relay.wanted.protocol, relay.holder)
        self._closing = []
        if failures:  # Everything else is as it should be; these are tried again.
            raise SyncFailed(self._told(failures))
        return SyncReport(operations + len(closing))

    def _told(self, failures: Mapping[int, str]) -> str:
        """Which relays can't listen, and why, in one line."""
        ports = {relay.number: str(key) for key, relays in self._relays.items() for relay in relays.values()}
        number, problem = next(iter(failures.items()))
        others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        return f"{ports[number]}: a relay can't listen: {problem}{others}"

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

    def _open(self, name: RelayName, wanted: WantedRelay) -> Relay | None:
        try:
            holder = self._allocator.open(
                self.family, wanted.protocol, self._listen or self._bind, name.port)
        except NoPort as error:
            log.error("a service port is not served", extra={
                "fields": {"service_port": str(name.key), "error": str(error)}
            })
            return None
        if self._listen is not None:
            log.info("listening", extra={"fields": {
                "service_port": str(name.key), "port": name.port,
                "at": format_socket(self._listen, holder.port), "protocol": wanted.protocol.name,
            }})
        return Relay(holder, wanted)

    def _serve(self, relay: Relay) -> Serve:
        wanted = relay.wanted
        return Serve(relay.number, wanted.protocol is Protocol.UDP, self._address, relay.holder.port,
                     wanted.endpoints, wanted.affinity_seconds)

    def _portals_of(self, key: ServicePortKey) -> list[tuple[Portal, int]]:
        """The portals that one service port wants, each with the port of its relay."""
        relays = self._relays.get(key, {}).values()
        return [(portal, relay.holder.port) for relay in relays for portal in relay.wanted.portals]

    def _give_up_places(self, key: ServicePortKey) -> None:
        """Let go of the ports of portals that one service port wants no longer."""
        held = self._held.pop(key, {})
        places = {_place(portal) for portal, _ in self._portals_of(key)}
        for place in held.keys() - places:
            holder = held.pop(place)
            if holder is not None:
                holder.close()
        if places:
            self._held[key] = held

    def _redirects(self, key: ServicePortKey) -> Iterator[Redirect]:
        """The portals of one service port, but for those whose port on this node somebody else has."""
        held = self._held.get(key, {})
        for portal, port in self._portals_of(key):
            place = _place(portal)
            if place not in held:
                try:
                    held[place] = hold(self.family, *place)
                except NoPort as error:
                    log.error("a portal is not opened", extra={
                        "fields": {"service_port": str(key), "error": str(error)}
                    })
                    continue
            yield Redirect(portal, port, self._bind)


def _all(applied: Mapping[ServicePortKey, frozenset[Redirect]]) -> list[Redirect]:
    return [redirect for found in list(applied.values()) for redirect in found]


def _place(portal: Portal) -> Place:
    return portal.protocol, portal.address, portal.port
