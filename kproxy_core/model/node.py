"""The node a proxy runs on, as far as planning depends on it."""

from dataclasses import dataclass

from kproxy_core.model.address import Address, Cidr, Family, family_of


@dataclass(frozen=True, slots=True)
class NodeObject:
    """The fields of a Node object that a proxy reads."""

    name: str
    zone: str = ""
    """Label ``topology.kubernetes.io/zone``."""
    addresses: tuple[Address, ...] = ()
    """InternalIPs, then ExternalIPs, in the order of the object."""
    pod_cidrs: tuple[Cidr, ...] = ()
    eligible: bool = True
    """Not being deleted and without the cluster autoscaler's deletion taint."""

    def address(self, family: Family) -> Address | None:
        """The node's first address of *family*."""
        return next((a for a in self.addresses if family_of(a) is family), None)


@dataclass(frozen=True, slots=True)
class LocalSource:
    """How to recognise traffic that starts at a pod of this node: exactly one field is set.

    The core says what is local, each backend says how to match it.
    """

    cidr: Cidr | None = None
    interface: str = ""
    interface_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What the plans and backends of one family know about the node."""

    family: Family
    name: str
    zone: str = ""
    local_source: LocalSource | None = None
    """None: local traffic can't be told apart; rules that need it are left out."""
    node_port_addresses: tuple[Address, ...] = ()
    """Addresses that serve node ports, sorted; loopback never among them."""
    node_ports_anywhere: bool = False
    """Node ports are served on every local address that is not loopback, also one that no interface has."""
    node_ports_on_loopback: bool = False
    """Loopback was asked for too, by name or with all addresses, if the mode can serve node ports there."""
    node_ip: Address | None = None
    service_cidrs: tuple[Cidr, ...] = ()
    """Where ClusterIPs come from; none lies within another."""
    masquerade_all: bool = False
    masquerade_bit: int = 14
