"""Which tracked UDP flows lead nowhere since Services or endpoints changed.

The kernel decides about NAT on a flow's first packet only. A UDP client that keeps
sending stays with an endpoint that has left, or with no endpoint at all if it began
before the Service did, until its flow is deleted; the next packet then begins a new
one. Connections of TCP and SCTP end by themselves.

As kube-proxy 1.36 (pkg/proxy/conntrack/cleanup.go): a flow to a frontend is stale
unless a serving endpoint answers it, and policies, hints and termination do not
matter, for a change of those must not cut flows that work. Unlike there

- only frontends whose flows may have become stale are looked at;
- a node port means the addresses that serve node ports, not every destination;
- a changed Service counts like a changed endpoint;
- a mode that relays in its own process answers flows itself, and knows of endpoints that go;
- without any serving endpoint, and when a frontend goes away, flows that were sent to an
  endpoint are stale too. kube-proxy left them, as later flows are rejected anyway; but
  clients that never pause never make a later flow (kubernetes issue 139628; changed in
  its pull requests 139629 and 141371). Flows that nobody translated are left alone then:
  nothing here could serve them better.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend, ServicePlan

Socket = tuple[Address, int]
"""Address and port; a `Destination` is one."""


@dataclass(frozen=True, slots=True)
class StaleFlows:
    """The stale ones among the UDP flows of one family; false in a condition if there can't be any."""

    frontends: frozenset[Frontend]
    """What was asked about."""
    vips: Mapping[Socket, frozenset[Destination]]
    """Who may answer, by ClusterIP, external IP or load balancer IP, and port. Nobody: the frontend is
    gone, or its Service has no serving endpoint."""
    node_ports: Mapping[int, frozenset[Destination]]
    """The same by node port."""
    node_port_addresses: frozenset[Address]

    def __bool__(self) -> bool:
        return bool(self.frontends)

    @property
    def ports(self) -> frozenset[int]:
        """The destination ports of all flows that may be stale."""
        return frozenset(frontend.port for frontend in self.frontends)

    def is_stale(self, destination: Socket, answered_by: Socket) -> bool:
        """Whether the flow from some client to *destination* must go.

        *answered_by* is the source of its answers: an endpoint, or *destination* itself if
        nobody translated the flow.
        """
        serving = self.vips.get(destination)
        if serving is None and destination[0] in self.node_port_addresses:
            serving = self.node_ports.get(destination[1])
        if serving is None or answered_by in serving or _at_any_address(answered_by) in serving:
            return False
        return bool(serving) or answered_by != destination


def relay(family: Family, port: int) -> Destination:
    """What stands for a port of this node, at whichever of its addresses, among those who may answer."""
    return Destination(Address(bytes(family.size)), port)


def _at_any_address(socket: Socket) -> Socket:
    address, port = socket
    return Address(bytes(len(address))), port


class _UdpPort(NamedTuple):
    """What decides about the flows of one UDP service port."""

    frontends: frozenset[Frontend] = frozenset()
    serving: frozenset[Destination] = frozenset()


class StaleFlowTracker:
    """Knows which frontends of one family have flows to look at. No I/O, not thread-safe.

    Tell it what the kernel was brought to, `take` what is due and delete that; if
    deleting fails, `give_back`. Nothing is due after changes that leave every flow right, such
    as one more endpoint. A new one takes every frontend for one to look at.
    """

    def __init__(self) -> None:
        self._ports: dict[ServicePortKey, _UdpPort] = {}
        self._owners: dict[Frontend, ServicePortKey] = {}
        self._due: set[Frontend] = set()
        self._node_port_addresses: frozenset[Address] = frozenset()

    def put(self, key: ServicePortKey, plan: ServicePlan | None, serving: frozenset[Destination]) -> None:
        """The kernel now holds *plan* for *key*; None: nothing. Protocols other than UDP are ignored.

        *serving* are the endpoints named by `serving_destinations`, and what stands for a `relay`. They can
        change while the plan does not. Endpoints that the plan uses although they do not serve, as
        publishNotReadyAddresses has it, keep their flows too.
        """
        if key.protocol is not Protocol.UDP:
            return
        before = self._ports.pop(key, _UdpPort())
        after = _UdpPort()
        if plan is not None:
            after = _UdpPort(frozenset(plan.frontends()), serving.union(plan.reachable))
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
        """What is due. *node_port_addresses* are all that serve node ports now.

        Where any local address serves node ports, those are all addresses of the node. One that was not
        there at the last call may have older flows to node ports.
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
            # A VIP that is an address of the node goes before a node port of the same number.
            for frontend in self._owners:
                address, _, port = frontend
                if address is not None and port in node_ports and address in node_port_addresses:
                    vips[address, port] = self._serving(frontend)
        return StaleFlows(due, vips, node_ports, node_port_addresses)

    def give_back(self, stale: StaleFlows) -> None:
        """What `take` returned could not be deleted: it is due again, to be judged by what holds then."""
        self._due |= stale.frontends

    def _serving(self, frontend: Frontend) -> frozenset[Destination]:
        """Who may answer flows to *frontend*."""
        owner = self._owners.get(frontend)
        if owner is None and frontend.address in self._node_port_addresses:
            owner = self._owners.get(frontend._replace(address=None))
        return frozenset() if owner is None else self._ports[owner].serving
