"""Routes of packets, as the kernel looks them up (linux/rtnetlink.h).

Everything acts on the network namespace in which the socket was made.
"""

import errno
import os
import socket
from typing import Final, NamedTuple, Self

from kproxy_core.linux import sysctl
from kproxy_core.linux.addresses import interface_name, read_route
from kproxy_core.linux.errors import doing
from kproxy_core.model.address import Address, Family, family_of, format_address
from kproxy_core.netlink.messages import NETLINK_ROUTE
from kproxy_core.netlink.sockets import NetlinkSocket

UNICAST: Final = 1
UNREACHABLE: Final = 7
"""Types of routes (RTN_*)."""


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
        # The kernel looks at the settings of IPv6 later.
        return _if_forwarded(found, Family.IPV6) if family_of(destination) is Family.IPV6 else found

    def forwarded(self, destination: Address, mark: int = 0) -> Route:
        """Return the route of a packet that arrived by an interface that is not known."""
        return _if_forwarded(self.leaving(destination, mark), family_of(destination))

    def _route(self, destination: Address, source: Address | None, interface: str, mark: int) -> Route:
        key = destination, source, interface, mark
        if key not in self._known:
            try:
                self._known[key] = self._asked(*key)
            except OSError as error:
                self._known[key] = Route(UNREACHABLE, why=_refusal(error, *key[:3]))
        return self._known[key]

    def _asked(self, destination: Address, source: Address | None, interface: str, mark: int) -> Route:
        arrived = socket.if_nametoindex(interface) if source is not None else 0
        found = read_route(self._socket, destination, source=source, arrived=arrived, mark=mark)
        return Route(found.type, interface_name(found.interface), found.interface)


_FORWARDING: Final = {Family.IPV4: "net/ipv4/ip_forward", Family.IPV6: "net/ipv6/conf/all/forwarding"}


def _if_forwarded(found: Route, family: Family) -> Route:
    """Return a route, or that the node forwards nothing."""
    if found.type != UNICAST or sysctl.read(_FORWARDING[family]) != "0":
        return found
    return Route(UNREACHABLE, why=_not_forwarded(family))


def _not_forwarded(family: Family) -> str:
    return f"{_FORWARDING[family].replace('/', '.')} is 0: this node forwards no packets"


def _is_off(interface: str) -> str:
    """Return the setting by which IPv4 packets that arrive by *interface* are not forwarded; "": they are."""
    if sysctl.read(_FORWARDING[Family.IPV4]) == "0":
        return _not_forwarded(Family.IPV4)
    own = f"net/ipv4/conf/{interface}/forwarding"
    return f"{own.replace('/', '.')} is 0" if sysctl.read(own) == "0" else ""


def _refusal(error: OSError, destination: Address, source: Address | None, interface: str) -> str:
    """Return why the kernel gives no route."""
    to = format_address(destination)
    if error.errno == errno.EXDEV and source is not None:
        return f"rp_filter drops it: no route back to {format_address(source)} by {interface}"
    if source is not None and error.errno == errno.EHOSTUNREACH and (off := _is_off(interface)):
        return off
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"no route leads to {to}"
    if error.errno == errno.EACCES:
        return f"the route to {to} prohibits it"
    if error.errno == errno.EINVAL:
        return f"the route to {to} is a black hole, or the kernel takes an address for a martian"
    return f"no route to {to}: {os.strerror(error.errno or 0)}"
