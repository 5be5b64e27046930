"""Acknowledged state of one family: open relays, and the portals that redirect to them. Pure."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.contract import Address, Protocol, ServicePortKey
from kproxy_userspace.wanted import Redirect, RelayName, Wanted

MOST_ADDED = 2_000
"""Limit for the portals of one service port that a change adds at once: some 0.2 s with iptables."""


class LocalPort(NamedTuple):
    protocol: Protocol
    number: int


class Relay(NamedTuple):
    number: int
    """The relay's number in orders to workers."""
    name: RelayName
    port: int
    wanted: Wanted
    service_port: int
    """The service port's number in orders to workers: that of its first relay."""

    @property
    def local_port(self) -> LocalPort:
        return LocalPort(self.wanted.protocol, self.port)

    @property
    def is_listening(self) -> bool:
        """Whether it has endpoints. Without, the port is bound, and clients are refused."""
        return bool(self.wanted.endpoints)

    def not_listening(self) -> Self:
        """Return the relay as it is before it listens, or after."""
        return self._replace(wanted=replace(self.wanted, endpoints=()))


class Difference(NamedTuple):
    """Portals to delete and to add."""

    deletes: list[Redirect]
    adds: list[Redirect]


class Applied:
    """The acknowledged state of one family."""

    def __init__(self) -> None:
        self.relays: dict[ServicePortKey, dict[RelayName, Relay]] = {}
        self.portals: dict[ServicePortKey, frozenset[Redirect]] = {}
        self.departing: dict[Relay, float] = {}
        """Relays without portals, kept because clients may be connecting to them, with the time at which
        their last portals were deleted (monotonic seconds)."""

    def current_relays(self) -> list[Relay]:
        """Return all relays except departing ones. From any thread."""
        return [relay for relays in list(self.relays.values()) for relay in list(relays.values())]

    def all_relays(self) -> list[Relay]:
        """Return all relays that have a port, departing ones too."""
        return self.current_relays() + list(self.departing)

    def all_portals(self) -> list[Redirect]:
        """Return all portals. From any thread."""
        return [redirect for redirects in list(self.portals.values()) for redirect in redirects]

    def surplus(self, relays: Mapping[ServicePortKey, Collection[RelayName]]) -> list[Relay]:
        """Return the relays of these service ports that are not among the wanted *relays*."""
        return [
            relay
            for key, names in relays.items()
            for name, relay in self.relays.get(key, {}).items() if name not in names
        ]  # fmt: skip

    def part(
        self, wanted: Mapping[ServicePortKey, frozenset[Redirect]]
    ) -> dict[ServicePortKey, frozenset[Redirect]]:
        """Return the *wanted* portals of some service ports, of many new ones a part. O(wanted).

        All of those that get another relay: their clients would wait for the last part.
        """
        found = dict(wanted)
        for key, redirects in wanted.items():
            held = self.portals.get(key, frozenset())
            adds = redirects - held
            if len(adds) > MOST_ADDED and {each.portal for each in held - redirects}.isdisjoint(
                    each.portal for each in adds):
                found[key] = (held & redirects).union(islice(adds, MOST_ADDED))
        return found

    def difference(self, wanted: Mapping[ServicePortKey, frozenset[Redirect]]) -> Difference:
        """Return the difference to the *wanted* portals of some service ports. O(wanted)."""
        found = Difference([], [])
        for key, redirects in wanted.items():
            held = self.portals.get(key, frozenset())
            found.deletes.extend(held - redirects)
            found.adds.extend(redirects - held)
        return found

    def portals_after(self, wanted: Mapping[ServicePortKey, frozenset[Redirect]]) -> list[Redirect]:
        """Return all portals once those of some service ports are the *wanted* ones. O(all)."""
        return [redirect for redirects in {**self.portals, **wanted}.values() for redirect in redirects]

    def acknowledge(self, portals: Mapping[ServicePortKey, frozenset[Redirect]]) -> None:
        """Record all *portals* of some service ports."""
        for key, redirects in portals.items():
            if redirects:
                self.portals[key] = redirects
            else:
                self.portals.pop(key, None)

    def acknowledge_relays(self, relays: Iterable[Relay]) -> None:
        for relay in relays:
            self.relays.setdefault(relay.name.key, {})[relay.name] = relay

    def acknowledge_closed(self, relays: Iterable[Relay], departing: Mapping[Relay, float]) -> None:
        """Record that *relays* no longer serve their service port, and which of them are *departing*."""
        self.departing.update(departing)
        for relay in relays:
            held = self.relays.get(relay.name.key, {})
            held.pop(relay.name, None)
            if not held:
                self.relays.pop(relay.name.key, None)

    def acknowledge_departed(self, departed: Iterable[Relay]) -> None:
        """Record that no client is connecting to these relays."""
        for relay in departed:
            self.departing.pop(relay, None)


class RelayedFlows(Struct, frozen=True):
    """UDP flows of conntrack that the relays of certain portals answer."""

    ports: frozenset[int]
    """Destination ports of the clients."""
    relays: frozenset[int]
    """Ports of the relays."""
    local: frozenset[Address]
    """Addresses of this node. Endpoints elsewhere may have the port of a relay."""

    @classmethod
    def of(cls, redirects: Iterable[Redirect], local: frozenset[Address]) -> Self:
        udp = [(portal.port, relay) for portal, relay, _ in redirects if portal.protocol is Protocol.UDP]
        return cls(frozenset(port for port, _ in udp), frozenset(relay for _, relay in udp), local)

    def is_stale(self, destination: tuple[Address, int], answered_by: tuple[Address, int]) -> bool:
        """Return whether the flow to *destination* is answered by one of the relays."""
        address, port = answered_by
        return port in self.relays and address in self.local and answered_by != destination
