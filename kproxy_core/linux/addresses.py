"""Addresses of this node's interfaces, their changes, and routes (linux/rtnetlink.h, linux/if_addr.h).

Everything acts on the network namespace of the calling thread.
"""

import logging
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kproxy_core.linux.errors import HostError, doing
from kproxy_core.model.address import Address, Family, family_of, is_link_local, is_loopback, parse_address
from kproxy_core.model.timing import Repeats
from kproxy_core.netlink.messages import NETLINK_ROUTE, Malformed, attribute, attributes, decoding, messages
from kproxy_core.netlink.sockets import NetlinkSocket, NotificationThread

log = logging.getLogger("kproxy.host")

RTM_NEWADDR: Final = 20
RTM_DELADDR: Final = 21
RTM_GETADDR: Final = 22
RTNLGRP_LINK: Final = 1
RTNLGRP_IPV4_IFADDR: Final = 5
RTNLGRP_IPV6_IFADDR: Final = 9
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2
IFADDRMSG: Final = struct.Struct("=BBBBI")
"""ifaddrmsg: address family, prefix length, flags, scope, interface."""

_RETRY_SECONDS: Final = 1.0

_ANYWHERE: Final = {Family.IPV4: "192.0.0.8", Family.IPV6: "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"}
"""Reserved addresses to which only a default route leads: the dummy address of RFC 7600, and the last one of
the documentation prefix."""

_RTM_GETROUTE: Final = 26
_RTMSG: Final = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_SRC, _RTA_IIF, _RTA_OIF, _RTA_MARK = 1, 2, 3, 4, 16
_RTN_LOCAL: Final = 2
_INDEX: Final = struct.Struct("=i")


class InterfaceAddress(NamedTuple):
    """An address of an interface. The kernel has no two that are equal in all fields."""

    interface: int
    family: int
    """AF_INET or AF_INET6."""
    prefix_length: int
    scope: int
    peer: bytes | None
    """IFA_ADDRESS: the other end of a point-to-point link, else the address itself."""
    local: bytes | None
    """IFA_LOCAL: the address itself; IPv6 sets it on point-to-point links only."""

    @property
    def address(self) -> Address:
        return Address(self.local or self.peer or b"")


def interface_name(index: int) -> str:
    """Return the name of an interface; "" if it has been deleted, as its addresses then are."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return ""


def decode_interface_address(data: bytes, start: int, end: int) -> InterfaceAddress:
    """Decode the payload of an RTM_NEWADDR or RTM_DELADDR message. Raises Malformed."""
    with decoding("an address of an interface"):
        family, prefix_length, _, scope, interface = IFADDRMSG.unpack_from(data, start)
    found = attributes(data, start + IFADDRMSG.size, end)
    address = InterfaceAddress(
        interface, family, prefix_length, scope, found.get(IFA_ADDRESS), found.get(IFA_LOCAL)
    )
    if prefix_length > 8 * len(address.address):
        raise Malformed(f"an address of {len(address.address)} bytes with a prefix of {prefix_length} bits")
    return address


def read_interface_addresses() -> list[InterfaceAddress]:
    """Return all addresses of all interfaces in both families. Raises HostError."""
    with doing("read interface addresses"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        return sock.dump(RTM_GETADDR, bytes(IFADDRMSG.size), lambda answers: [
            decode_interface_address(*answer) for answer in answers])


_Accepts = Callable[[str], bool]
"""Returns True for names of interfaces whose addresses are to be reported."""


def node_addresses(accepts: _Accepts = lambda _: True) -> frozenset[Address]:
    """Return the addresses of all accepted interfaces, loopback and link-local ones included.

    Raises HostError.
    """
    return frozenset(each.address for each in _read(accepts))


def default_source_address(family: Family) -> Address | None:
    """Return the address from which this node sends along the default route of *family*.

    None without such a route. No packet is sent.
    """
    try:
        with socket.socket(family.af, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect((_ANYWHERE[family], 9))
            address = Address(socket.inet_pton(family.af, sock.getsockname()[0].partition("%")[0]))
    except OSError:
        return None
    return None if is_loopback(address) or is_link_local(address) else address


class AddressWatch(NotificationThread):
    """Calls back with all node addresses (see `node_addresses`) whenever they have changed."""

    def __init__(
        self, callback: Callable[[frozenset[Address]], None], accepts: _Accepts = lambda _: True
    ) -> None:
        """Start watching. Raises HostError.

        Both functions are called from the watch's thread, *accepts* whenever an address is added.
        """
        self._callback = callback
        self._accepts = accepts
        self._complete = True
        self._repeats = Repeats()
        with doing("watch interface addresses"):
            sock = NetlinkSocket.open(NETLINK_ROUTE, groups=(RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR))
        try:
            # After subscribing: a change during the read is in a notification as well.
            self._held = _read(accepts)
        except BaseException:
            sock.close()
            raise
        self.addresses = self._known()
        super().__init__("kproxy-addresses", sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> float | None:
        for data in datagrams:
            self._follow(data)
        if lost:
            self._complete = False
            log.info("interface address notifications lost, reading all addresses")
        if not self._complete:
            try:
                self._held = _read(self._accepts)
                self._complete = True
                self._repeats.end()
            except HostError as error:
                if times := self._repeats.count(str(error)):
                    log.warning("interface addresses not read, retrying in a second", extra={
                        "fields": {"error": str(error), "times": times}
                    })  # fmt: skip
        addresses = self._known()
        if addresses != self.addresses:
            self.addresses = addresses
            self._callback(addresses)
        return None if self._complete else _RETRY_SECONDS

    def _follow(self, data: bytes) -> None:
        for kind, _, _, start, end in messages(data):
            if kind in (RTM_NEWADDR, RTM_DELADDR):
                changed = decode_interface_address(data, start, end)
                if kind == RTM_DELADDR:
                    self._held.discard(changed)
                elif self._accepts(interface_name(changed.interface)):
                    self._held.add(changed)

    def _known(self) -> frozenset[Address]:
        return frozenset(each.address for each in self._held)


def _read(accepts: _Accepts) -> set[InterfaceAddress]:
    found = read_interface_addresses()
    accepted = {index for index in {each.interface for each in found} if accepts(interface_name(index))}
    return {each for each in found if each.interface in accepted}


class Route(NamedTuple):
    interface: int
    type: int
    """RTN_*."""

    @property
    def is_local(self) -> bool:
        """This node receives the packets itself."""
        return self.type == _RTN_LOCAL


def read_route(
    sock: NetlinkSocket, address: Address, *, source: Address | None = None, arrived: int = 0, mark: int = 0
) -> Route:
    """Return the route to *address*, as packets of this node take it. Raises OSError without one.

    *source* and *arrived*: as packets from there take it that arrived by this interface.
    """
    family = family_of(address)
    header = _RTMSG.pack(family.af, family.bits, family.bits if source else 0, 0, 0, 0, 0, 0, 0)
    wanted = attribute(_RTA_DST, address)
    if source is not None:
        wanted += attribute(_RTA_SRC, source) + attribute(_RTA_IIF, _INDEX.pack(arrived))
    if mark:
        wanted += attribute(_RTA_MARK, struct.pack("=I", mark))
    data, start, end = sock.request_one(_RTM_GETROUTE, header + wanted)
    with decoding("a route"):
        interface = attributes(data, start + _RTMSG.size, end).get(_RTA_OIF, bytes(4))
        number: int = _INDEX.unpack(interface)[0]
        if number < 0:
            raise ValueError(number)
        return Route(number, _RTMSG.unpack_from(data, start)[7])


def interface_towards(address: Address) -> str:
    """Return the name of the interface that leads to *address*; "" without a route. Raises HostError."""
    with doing("open a netlink socket"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        try:
            return interface_name(read_route(sock, address).interface)
        except OSError:
            return ""


def default_interface(family: Family) -> str:
    """Return the name of the interface of the default route; "" without one. Raises HostError."""
    return interface_towards(parse_address(_ANYWHERE[family]))
