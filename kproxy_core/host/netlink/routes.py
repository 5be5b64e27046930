"""The routes to single addresses (linux/rtnetlink.h), in the network namespace of the calling thread."""

import struct
import sys
from typing import Final, NamedTuple

from kproxy_core.host.errors import doing
from kproxy_core.host.netlink.addresses import interface_name
from kproxy_core.host.netlink.messages import NETLINK_ROUTE, attribute, attributes
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Address, family_of

_RTM_GETROUTE: Final = 26
_RTMSG: Final = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF = 1, 4
_RTN_LOCAL: Final = 2


class Route(NamedTuple):
    interface: int
    is_local: bool
    """Packets end on this node."""


def read_route(sock: NetlinkSocket, address: Address) -> Route:
    """Return the route to *address*, as packets of this node take it. Raises OSError without one."""
    family = family_of(address)
    header = _RTMSG.pack(family.af, family.bits, 0, 0, 0, 0, 0, 0, 0)
    ((data, start, end),) = sock.request(_RTM_GETROUTE, 0, header + attribute(_RTA_DST, address))
    interface = attributes(data, start + _RTMSG.size, end).get(_RTA_OIF, b"")
    return Route(int.from_bytes(interface, sys.byteorder), _RTMSG.unpack_from(data, start)[7] == _RTN_LOCAL)


def interface_towards(address: Address) -> str:
    """Return the name of the interface that leads to *address*; "" without a route. Raises HostError."""
    with doing("open a netlink socket"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        try:
            return interface_name(read_route(sock, address).interface)
        except OSError:
            return ""
