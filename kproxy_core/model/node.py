"""The properties of the proxy's node that plans depend on."""

import re
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from kproxy_core.model.address import Address, Cidr, Family, family_of

NodePortAddresses = tuple[Cidr | Literal["primary"], ...]
"""Networks whose addresses serve node ports. (): all addresses; primary: the node's own address."""

LONGEST_INTERFACE: Final = 15
"""Characters of an interface's name (IFNAMSIZ in linux/if.h, without the final 0)."""
_INTERFACE = re.compile(r"""(?:(?![/:*"\\])[!-~])+""")


def is_interface_name(text: str, longest: int = LONGEST_INTERFACE) -> bool:
    """Return whether *text* may name an interface, without characters that are special to nft."""
    return len(text) <= longest and _INTERFACE.fullmatch(text) is not None


class NodeObject(Struct, frozen=True):
    name: str
    zone: str = ""
    """Label ``topology.kubernetes.io/zone``."""
    addresses: tuple[Address, ...] = ()
    """InternalIPs, then ExternalIPs, in the order of the object."""
    pod_cidrs: tuple[Cidr, ...] = ()
    eligible: bool = True
    """Not being deleted and without the cluster autoscaler's deletion taint."""
    labels: Mapping[str, str] = {}

    def address(self, family: Family) -> Address | None:
        return next((a for a in self.addresses if family_of(a) is family), None)


class LocalSource(Struct, frozen=True):
    """The mark of traffic that starts at a pod of this node. Exactly one field is set.

    The core decides what is local, each backend how to match it.
    """

    cidr: Cidr | None = None
    interface: str = ""
    interface_prefix: str = ""

    def has_interface(self, name: str) -> bool:
        """Return whether pods of this node send through the interface *name*. Only without `cidr`."""
        if self.interface_prefix:
            return name.startswith(self.interface_prefix)
        return name == self.interface


class NodeView(Struct, frozen=True, kw_only=True):
    """The node's properties for the plans and the backend of one family."""

    family: Family
    name: str
    zone: str = ""
    local_source: LocalSource | None = None
    """None: local traffic cannot be recognised; rules that need it are omitted."""
    node_port_addresses: tuple[Address, ...] = ()
    """Addresses that serve node ports, sorted, without loopback."""
    node_ports_anywhere: bool = False
    """Every local address except loopback serves node ports, including those that no interface has."""
    node_ports_on_loopback: bool = False
    """Node ports are requested on loopback, too, by name or as one of all addresses."""
    relays_node_ports: bool = False
    """The core relays them there for a backend that asks (`Backend.wants_relays`): loopback is requested by
    name (KEP-6032)."""
    node_ip: Address | None = None
    service_cidrs: tuple[Cidr, ...] = ()
    """Networks of ClusterIPs; none contains another."""
    masquerade_all: bool = False
    masquerade_bit: int = 14
    removed_endpoints: str = "keep"
    """For Services that do not say: ``keep`` or ``reset`` (see `plan.removed_endpoints`)."""
