"""Bridges whose packets iptables sees while they are on a port (br_netfilter, linux/if_link.h)."""

import struct
from collections.abc import Iterable
from typing import Final

from kproxy_core.host import sysctl
from kproxy_core.host.errors import HostError, doing
from kproxy_core.host.netlink.messages import NETLINK_ROUTE, attributes
from kproxy_core.host.netlink.routes import read_route
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Address, Family

_RTM_GETLINK: Final = 18
_IFINFOMSG: Final = struct.Struct("=BxHiII")
_IFLA_LINKINFO, _INFO_KIND, _INFO_DATA = 18, 1, 2
_NF_CALL: Final = {Family.IPV4: 36, Family.IPV6: 37}
"""IFLA_BR_NF_CALL_IPTABLES and IFLA_BR_NF_CALL_IP6TABLES."""
_SYSCTL: Final = {Family.IPV4: "bridge-nf-call-iptables", Family.IPV6: "bridge-nf-call-ip6tables"}


def bridged_sources(sources: Iterable[Address], family: Family) -> frozenset[Address]:
    """Return those of *sources* whose packets meet iptables while they enter a port of a bridge.

    Assumes that packets from an address arrive where the route to it leads. Raises HostError.
    """
    try:
        everywhere = sysctl.read(f"net/bridge/{_SYSCTL[family]}") != "0"
    except HostError:
        return frozenset()  # The kernel lacks br_netfilter.
    with doing("read the routes to senders"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        return frozenset(
            source for source in set(sources)
            if (device := _device(sock, source)) and _filters(sock, device, family, everywhere=everywhere)
        )  # fmt: skip


def _device(sock: NetlinkSocket, address: Address) -> int:
    """Return the index of the interface that leads to *address*; 0 without a route."""
    try:
        return read_route(sock, address).interface
    except OSError:
        return 0


def _filters(sock: NetlinkSocket, device: int, family: Family, *, everywhere: bool) -> bool:
    """Return whether *device* is a bridge that shows its ports' packets to iptables. Raises OSError."""
    ((data, start, end),) = sock.request(_RTM_GETLINK, 0, _IFINFOMSG.pack(0, 0, device, 0, 0))
    info = attributes(attributes(data, start + _IFINFOMSG.size, end).get(_IFLA_LINKINFO, b""))
    if info.get(_INFO_KIND, b"").rstrip(b"\0") != b"bridge":
        return False
    return everywhere or attributes(info[_INFO_DATA])[_NF_CALL[family]] != b"\0"
