"""Routes of packets, as the kernel looks them up (linux/rtnetlink.h).

Everything acts on the network namespace in which the socket was made.
"""

import errno
import os
import socket
import struct
from typing import Final, NamedTuple, Self

from kproxy_core.linux import sysctl
from kproxy_core.linux.addresses import interface_name
from kproxy_core.linux.errors import doing
from kproxy_core.model.address import Address, Family, family_of, format_address
from kproxy_core.netlink.messages import NETLINK_ROUTE, attribute, attributes, decoding
from kproxy_core.netlink.sockets import NetlinkSocket

UNICAST: Final = 1
LOCAL: Final = 2
UNREACHABLE: Final = 7
"""Types of routes (RTN_*)."""

_GETROUTE: Final = 26
_RTMSG: Final = struct.Struct("=BBBBBBBBI")
_DESTINATION, _SOURCE, _ARRIVED, _OUTPUT, _MARK = 1, 2, 3, 4, 16
"""RTA_*."""


class Route(NamedTuple):
    type: int
    """RTN_*; `UNREACHABLE` if the kernel does not let the packet pass."""
    interface: str = ""
    number: int = 0
    why: str = ""
    """Why it does not."""


class Routes:
    """A context that asks the kernel for routes, each once."""

    def __init__(self) -> None:
        """Raises HostError."""
        with doing("open a netlink socket"):
            self._socket = NetlinkSocket.open(NETLINK_ROUTE)
        self._known: dict[tuple[Address, Address | None, str, int], Route] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def leaving(self, destination: Address, mark: int = 0) -> Route:
        """Return the route of a packet that this node sends."""
        return self._route(destination, None, "", mark)

    def arrived(self, destination: Address, source: Address, interface: str, mark: int = 0) -> Route:
        """Return the route of a packet that arrived: rp_filter and the settings of forwarding apply."""
        found = self._route(destination, source, interface, mark)
        if found.type == UNICAST and family_of(destination) is Family.IPV6 and not is_forwarded(
                Family.IPV6, interface):
            return Route(UNREACHABLE, why=_not_forwarded(Family.IPV6, interface))
        return found

    def _route(self, destination: Address, source: Address | None, interface: str, mark: int) -> Route:
        key = destination, source, interface, mark
        if key not in self._known:
            try:
                self._known[key] = self._asked(*key)
            except OSError as error:
                self._known[key] = Route(UNREACHABLE, why=_refusal(error, *key[:3]))
        return self._known[key]

    def _asked(self, destination: Address, source: Address | None, interface: str, mark: int) -> Route:
        family = family_of(destination)
        header = _RTMSG.pack(family.af, family.bits, family.bits if source else 0, 0, 0, 0, 0, 0, 0)
        wanted = attribute(_DESTINATION, destination)
        if source is not None:
            wanted += attribute(_SOURCE, source)
            wanted += attribute(_ARRIVED, struct.pack("=I", socket.if_nametoindex(interface)))
        if mark:
            wanted += attribute(_MARK, struct.pack("=I", mark))
        data, start, end = self._socket.request_one(_GETROUTE, header + wanted)
        with decoding("a route"):
            index = int.from_bytes(attributes(data, start + _RTMSG.size, end).get(_OUTPUT, b""), "little")
            return Route(_RTMSG.unpack_from(data, start)[7], interface_name(index), index)


def is_forwarded(family: Family, interface: str = "") -> bool:
    """Return whether the node forwards packets that arrive by *interface*; "": by any."""
    # The kernel asks the interface for IPv4, and the whole namespace for IPv6.
    scope = interface if interface and family is Family.IPV4 else "all"
    return sysctl.read(f"net/{family.label.lower()}/conf/{scope}/forwarding") != "0"


def _not_forwarded(family: Family, interface: str) -> str:
    if family is Family.IPV6:
        return "net.ipv6.conf.all.forwarding is 0: this node forwards no packets"
    if sysctl.read("net/ipv4/ip_forward") == "0":
        return "net.ipv4.ip_forward is 0: this node forwards no packets"
    return f"net.ipv4.conf.{interface}.forwarding is 0"


def _refusal(error: OSError, destination: Address, source: Address | None, interface: str) -> str:
    """Return why the kernel gives no route."""
    to = format_address(destination)
    if error.errno == errno.EXDEV and source is not None:
        return f"rp_filter drops it: no route back to {format_address(source)} by {interface}"
    if source is not None and error.errno == errno.EHOSTUNREACH and not is_forwarded(
            family_of(destination), interface):
        return _not_forwarded(family_of(destination), interface)
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"no route leads to {to}"
    if error.errno == errno.EACCES:
        return f"the route to {to} prohibits it"
    if error.errno == errno.EINVAL:
        return f"the route to {to} is a black hole, or the kernel takes an address for a martian"
    return f"no route to {to}: {os.strerror(error.errno or 0)}"
