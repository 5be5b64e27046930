"""Tracked UDP flows that changes of Services or endpoints have made stale.

The kernel decides about NAT on a flow's first packet only. A UDP client that keeps sending reaches a deleted
endpoint, or none at all if it started before the Service existed, until its flow is deleted; the next packet
then starts a new one. Connections of TCP and SCTP end by themselves; for a TCP client that has no answer yet,
see `is_stale_syn`.

As kube-proxy 1.36 (pkg/proxy/conntrack/cleanup.go): a flow to a frontend is stale unless a serving endpoint
answers it. Policies, hints and termination do not matter, because changing them must not cut working flows.
Unlike there

- only frontends whose flows may have become stale are examined; - a node port means the addresses that serve
node ports, not every destination; - a changed Service counts like a changed endpoint; - a mode that relays in
its own process answers flows itself, and handles deleted endpoints. Relays that were replaced, by another
mode for example, answer as well until an endpoint is deleted: they do not learn of it; - without any serving
endpoint, and when a frontend is deleted, flows that were sent to an endpoint are stale too. kube-proxy left
them, as later flows are rejected anyway; but clients that never pause never make a later flow (kubernetes
issue 139628; changed in its pull requests 139629 and 141371). Untranslated flows are kept in that case:
nothing here could serve them better.
"""

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from msgspec import Struct

from kproxy_core.model.address import Address, Family, Protocol, Socket
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan

Owner = Callable[[Frontend], object]
"""Returns None for a frontend that no service port has."""


class StaleFlows(Struct, frozen=True):
    """The condition for UDP flows of one family to be stale; falsy if none can be."""

    frontends: frozenset[Frontend]
    """The examined frontends."""
    vips: Mapping[Socket, frozenset[Destination]]
    """Endpoints that may answer, by VIP and port. Empty: the frontend was deleted, or its Service has no
    serving endpoint."""
    node_ports: Mapping[int, frozenset[Destination]]
    """Endpoints that may answer, by node port."""
    node_port_addresses: frozenset[Address]

    def __bool__(self) -> bool:
        return bool(self.frontends)

    @property
    def ports(self) -> frozenset[int]:
        """The destination ports of all flows that may be stale."""
        return frozenset(frontend.port for frontend in self.frontends)

    def is_stale(self, destination: Socket, answered_by: Socket) -> bool:
        """Return whether a flow to *destination* must be deleted.

        *answered_by* is the source of its replies: an endpoint, or *destination* itself if the flow is not
        translated.
        """
        serving = self.vips.get(destination)
        if serving is None and destination[0] in self.node_port_addresses:
            serving = self.node_ports.get(destination[1])
        if serving is None or answered_by in serving or _at_any_address(answered_by) in serving:
            return False
        return bool(serving) or answered_by != destination


def is_stale_syn(destination: Socket, owner: Owner, node_port_addresses: Set[Address]) -> bool:
    """Return whether a TCP connection to *destination* that nothing has answered or translated is stale.

    Its client retransmits the SYN for two minutes in vain: the kernel tracked the first one before the
    Service existed, or while rules were missing. A SYN that a rule rejects or drops is not tracked.
    kube-proxy 1.36 keeps such connections.
    """
    address, port = destination
    return owner(Frontend(address, Protocol.TCP, port)) is not None or (
        address in node_port_addresses and owner(Frontend(None, Protocol.TCP, port)) is not None)


def adds_tcp(before: ServicePlan | None, after: ServicePlan | None) -> bool:
    """Return whether *after* has a TCP frontend that *before* lacks."""
    if after is None or after.key.protocol is not Protocol.TCP:
        return False
    return before is None or not set(after.frontends()).issubset(before.frontends())


def relay(family: Family, port: int) -> Destination:
    """Return a destination that stands for a relay at *port* on any address of this node."""
    return Destination(family.unspecified, port)


def _is_relay(destination: Destination) -> bool:
    return not any(destination.address)


def _at_any_address(socket: Socket) -> Socket:
    address, port = socket
    return Address(bytes(len(address))), port


class _UdpPort(NamedTuple):
    """The frontends of one UDP service port, and the endpoints that may answer."""

    frontends: frozenset[Frontend] = frozenset()
    serving: frozenset[Destination] = frozenset()


class StaleFlowTracker:
    """Tracks the frontends of one family whose flows may be stale. No I/O, not thread-safe.

    Call `put` with the state of the kernel, `take` the stale flows and delete them; if that fails, call
    `give_back`. Changes that leave every flow valid, such as an additional endpoint, make nothing due. A new
    tracker treats every frontend as possibly stale.
    """

    def __init__(self) -> None:
        self._ports: dict[ServicePortKey, _UdpPort] = {}
        self._owners: dict[Frontend, ServicePortKey] = {}
        self._due: set[Frontend] = set()
        self._node_port_addresses: frozenset[Address] = frozenset()

    def put(self, key: ServicePortKey, plan: ServicePlan | None, serving: frozenset[Destination]) -> None:
        """Record that the kernel now holds *plan* for *key*; None: nothing. Ignores protocols other than UDP.

        *serving* are the endpoints of `serving_destinations`, and each `relay`. They can change while the
        plan does not. Endpoints that the plan uses although they do not serve (publishNotReadyAddresses) keep
        their flows, too.
        """
        if key.protocol is not Protocol.UDP:
            return
        before = self._ports.pop(key, _UdpPort())
        after = _UdpPort()
        if plan is not None:
            after = _UdpPort(frozenset(plan.frontends()), serving.union(plan.reachable, plan.resting))
            gone = before.serving - after.serving
            if all(map(_is_relay, gone)):
                after = after._replace(serving=after.serving | gone)
            self._ports[key] = after
        for frontend in before.frontends - after.frontends:
            # Another service port may have taken it over just before.
            if self._owners.get(frontend) == key:
                del self._owners[frontend]
                self._due.add(frontend)
        for frontend in after.frontends:
            if self._owners.get(frontend) != key:
                self._owners[frontend] = key
                self._due.add(frontend)
        if before.serving - after.serving or (after.serving and not before.serving):
            self._due |= after.frontends

    def take(self, node_port_addresses: frozenset[Address]) -> StaleFlows:
        """Return the condition for flows that are due. *node_port_addresses* serve node ports now.

        These are all addresses of the node if any local address serves node ports. An address that is new
        since the last call may have older flows to node ports.
        """
        if node_port_addresses - self._node_port_addresses:
            self._due.update(frontend for frontend in self._owners if frontend.address is None)
        self._node_port_addresses = node_port_addresses
        due, self._due = frozenset(self._due), set()
        vips = {}
        node_ports = {}
        for frontend in due:
            if frontend.address is None:
                node_ports[frontend.port] = self._serving(frontend)
            else:
                vips[frontend.address, frontend.port] = self._serving(frontend)
        if node_ports:
            # A VIP that is an address of the node takes precedence over a node port of the same number.
            for frontend in self._owners:
                address, _, port = frontend
                if address is not None and port in node_ports and address in node_port_addresses:
                    vips[address, port] = self._serving(frontend)
        return StaleFlows(due, vips, node_ports, node_port_addresses)

    def examine_all(self) -> None:
        """Make all frontends due: some rules were missing, and flows may have begun without them."""
        self._due.update(self._owners)

    def give_back(self, stale: StaleFlows) -> None:
        """Make *stale*, whose deletion failed, due again. The state at the next `take` decides."""
        self._due |= stale.frontends

    def _serving(self, frontend: Frontend) -> frozenset[Destination]:
        """Return the endpoints and relays that may answer flows to *frontend*."""
        owner = self._owners.get(frontend)
        if owner is None and frontend.address in self._node_port_addresses:
            owner = self._owners.get(frontend._replace(address=None))
        return frozenset() if owner is None else self._ports[owner].serving
