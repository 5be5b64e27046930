"""Facts about this node, from the configuration, its Node object and its interfaces."""

import logging
from collections.abc import Callable

from msgspec import Struct

from kproxy_core.model.address import Address, Cidr, Family, family_of
from kproxy_core.model.node import LocalSource, NodeObject, NodePortAddresses, NodeView
from kproxy_core.plan.service_plan import includes_loopback, names_loopback, select_node_port_addresses

log = logging.getLogger("kproxy.run")


class NodeSettings(Struct, frozen=True, kw_only=True):
    name: str
    local: LocalSource | tuple[Cidr, ...] | None = ()
    """Source of local traffic: an interface for both families, or networks, the first of each family.
    None: the pod networks of the Node object."""
    node_ports: NodePortAddresses = ()
    may_relay: bool = True
    """The core may relay node ports on loopback where `node_ports` names it."""
    bind_address: Address | None = None
    """Overrides the Node object's address of its family."""
    guess_address: Callable[[Family], Address | None] | None = None
    """Returns the node's address while there is no Node object. None: it is unknown until then."""
    masquerade_all: bool = False
    masquerade_bit: int = 14
    removed_endpoints: str = "keep"


class NodeFacts:
    """Current facts about the node. `view` selects those of one family."""

    def __init__(self, settings: NodeSettings, addresses: frozenset[Address]) -> None:
        self.node: NodeObject | None = None
        self.service_cidrs: tuple[Cidr, ...] = ()
        self.addresses = addresses
        """Addresses of all interfaces."""
        self._settings = settings
        self._reported: dict[Family, str] = {}
        self._pod_networks: dict[Family, Cidr] = {}

    def with_settings(self, settings: NodeSettings) -> "NodeFacts":
        facts = NodeFacts(settings, self.addresses)
        facts.node, facts.service_cidrs = self.node, self.service_cidrs
        facts._reported = dict(self._reported)
        facts._pod_networks = dict(self._pod_networks)
        return facts

    def view(self, family: Family) -> NodeView:
        """Return *family*'s view of the node. Log why it serves no node ports when that changes."""
        view, problem = self.look(family)
        if self._reported.get(family, "") != problem:
            self._reported[family] = problem
            if problem:
                to_whom = " to other machines" if view.node_ports_on_loopback else ""
                log.warning("node ports are not served%s", to_whom, extra={
                    "fields": {"ip_family": family.label, "reason": problem}
                })
        return view

    def look(self, family: Family) -> tuple[NodeView, str]:
        """Return the view, and why it serves no node ports; "": it does."""
        settings = self._settings
        own = self._own_address(family)
        node_ports = select_node_port_addresses(settings.node_ports, own, self.addresses, family)
        view = NodeView(
            family=family,
            name=settings.name,
            zone=self.node.zone if self.node else "",
            local_source=self._local_source(family),
            node_port_addresses=node_ports.addresses,
            node_ports_anywhere=node_ports.anywhere,
            node_ports_on_loopback=includes_loopback(settings.node_ports, family),
            relays_node_ports=settings.may_relay and names_loopback(settings.node_ports, family),
            node_ip=own,
            service_cidrs=tuple(cidr for cidr in self.service_cidrs if cidr.family is family),
            masquerade_all=settings.masquerade_all,
            masquerade_bit=settings.masquerade_bit,
            removed_endpoints=settings.removed_endpoints,
        )
        return view, node_ports.problem

    def _own_address(self, family: Family) -> Address | None:
        bound = self._settings.bind_address
        if bound is not None and family_of(bound) is family:
            return bound
        if self.node is not None:
            return self.node.address(family)
        guess = self._settings.guess_address
        return guess(family) if guess is not None else None

    def _local_source(self, family: Family) -> LocalSource | None:
        local = self._settings.local
        if isinstance(local, LocalSource):
            return local
        if local is None:
            found = self._pod_network(family)
        else:
            found = next((cidr for cidr in local if cidr.family is family), None)
        return LocalSource(cidr=found) if found is not None else None

    def _pod_network(self, family: Family) -> Cidr | None:
        """Return the network of this node's pods. kube-proxy exits when it changes; our rules follow."""
        pod_cidrs = self.node.pod_cidrs if self.node else ()
        found = next((cidr for cidr in pod_cidrs if cidr.family is family), None)
        before = self._pod_networks.get(family)
        if found is not None and found != before:
            self._pod_networks[family] = found
            if before is not None:
                log.info("pod network changed", extra={
                    "fields": {"ip_family": family.label, "before": before, "after": found}})
        return found


def primary_family(bind_address: Address | None, node: NodeObject | None) -> Family:
    """Return the family of single-stack Services: that of *bind_address*, or of the node's first address."""
    if bind_address is not None:
        return family_of(bind_address)
    return family_of(node.addresses[0]) if node is not None and node.addresses else Family.IPV4
