"""The dummy interface that holds the addresses of Services (linux/rtnetlink.h, linux/if_addr.h).

pyroute2 creates the interface. It is imported for that only, because it takes 19 MiB and any mode may look
for the interface or delete it. Addresses and routes are written in batches, which pyroute2 does not support.
"""

import errno
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence

from kproxy_core.contract import Address, Family, HostError, format_address
from kproxy_core.linux import packages
from kproxy_core.linux.addresses import (
    IFA_ADDRESS,
    IFA_LOCAL,
    IFADDRMSG,
    RTM_DELADDR,
    RTM_NEWADDR,
    read_interface_addresses,
    read_route,
)
from kproxy_core.linux.errors import doing
from kproxy_core.netlink.messages import (
    NETLINK_ROUTE,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NetlinkRequest,
    attribute,
    decoding,
    text_attribute,
)
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_ipvs.names import DEVICE

_RTM_DELLINK, _RTM_GETLINK, _IFLA_IFNAME = 17, 18, 3
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_CREATE = NLM_F_CREATE | NLM_F_EXCL
_IFINFOMSG = struct.Struct("=BxHiII")
_IFA_F_NODAD = 0x02
_LINK_LOCAL_SCOPE = 253

_RTMSG = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_RTPROT_KERNEL, _RTPROT_STATIC = 2, 4
_TABLE_LOCAL, _TYPE_LOCAL, _SCOPE_HOST = 255, 2, 254

_ROUTE_CHECKS, _CHECK_PERIOD = 5000, 0.0002
"""Number of checks for a route, and seconds between them."""

_PRESENT = frozenset({errno.EEXIST})
_UNREACHABLE = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH})
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.ENODEV, errno.ESRCH})


def exists() -> bool:
    return _index() is not None


def ensure() -> bool:
    """Create the device unless it exists. Return True if it was created. Raises HostError."""
    if exists():
        return False
    if problem := packages.lacking("ipvs", "pyroute2"):
        raise HostError(f"the ipvs mode {problem}")
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            route.link("add", ifname=DEVICE, kind="dummy")
    except NetlinkError as error:
        if error.code not in _PRESENT:
            raise HostError(f"cannot create {DEVICE}", OSError(error.code, str(error))) from error
    except OSError as error:
        raise HostError(f"cannot create {DEVICE}", error) from error
    return True


def delete() -> None:
    """Delete the device with all its addresses. A missing device is no error. Raises HostError."""
    index = _index()
    if index is not None:
        # The IPv6 routes of `lend_source` do not belong to the device.
        unbind(read(Family.IPV6)[0], Family.IPV6)
        _send([NetlinkRequest(_RTM_DELLINK, 0, _IFINFOMSG.pack(0, 0, index, 0, 0))], _ABSENT)


def read(family: Family) -> tuple[frozenset[Address], frozenset[Address]]:
    """Return the addresses of *family* on the device and those on other interfaces. Raises HostError."""
    index = _index()
    found = [each for each in read_interface_addresses() if each.family == family.af]
    own = [each for each in found if each.interface == index]
    return (
        frozenset(each.address for each in own if family is Family.IPV4 or each.scope != _LINK_LOCAL_SCOPE),
        frozenset(each.address for each in found if each.interface != index),
    )


def lend_source(addresses: Iterable[Address], source: Address, family: Family) -> None:
    """Make *source* the source address of the node's own new connections to *addresses*.

    By default the source is the dialled address, and connections break when the device loses it. Raises
    HostError.
    """
    preferred = attribute(_RTA_PREFSRC, source)
    requests = []
    for address in addresses:
        if family is Family.IPV4:
            requests.append(_route(_RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, address, family, preferred))
        else:
            # No new route can have the metric of the kernel's own, so delete that one.
            requests.append(_route(_RTM_NEWROUTE, _CREATE, address, family, preferred))
            requests.append(_route(_RTM_DELROUTE, 0, address, family, protocol=_RTPROT_KERNEL))
    _send(requests, _PRESENT | _ABSENT)


def bind(addresses: Iterable[Address], family: Family) -> None:
    """Add *addresses* to the device. Existing ones are no error. Raises HostError."""
    addresses = list(addresses)
    _change(RTM_NEWADDR, _CREATE, addresses, family, _PRESENT)
    if family is Family.IPV6 and addresses:
        _await_local(addresses[-1])


def _await_local(address: Address) -> None:
    """Wait until *address* is routed to this node. Raises HostError.

    The kernel acknowledges an IPv6 address before it has created the route, in the order of the addresses
    (addrconf_dad_work, net/ipv6/addrconf.c). IPVS does not see packets until then.
    """
    with doing(f"read the route to {format_address(address)}"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        for _ in range(_ROUTE_CHECKS):
            try:
                if read_route(sock, address).is_local:
                    return
            except OSError as error:
                if error.errno not in _UNREACHABLE:
                    raise
            time.sleep(_CHECK_PERIOD)
    raise HostError(f"{format_address(address)} on {DEVICE} does not become local")


def unbind(addresses: Collection[Address], family: Family) -> None:
    """Delete *addresses* from the device. Missing ones are no error. Raises HostError."""
    _change(RTM_DELADDR, 0, addresses, family, _ABSENT)
    _send([_route(_RTM_DELROUTE, 0, address, family) for address in addresses], _ABSENT)


def _change(
    kind: int, flags: int, addresses: Collection[Address], family: Family, accepted: frozenset[int]
) -> None:
    if not addresses:
        return
    index = _index()
    if index is None:
        raise HostError(f"interface {DEVICE} does not exist")
    header = IFADDRMSG.pack(family.af, family.bits, _IFA_F_NODAD, 0, index)
    _send([
        NetlinkRequest(kind, flags, header + attribute(IFA_LOCAL, address) + attribute(IFA_ADDRESS, address))
        for address in addresses
    ], accepted)  # fmt: skip


def _route(
    kind: int, flags: int, address: Address, family: Family, *more: bytes, protocol: int = _RTPROT_STATIC
) -> NetlinkRequest:
    """Return a request for a local route to *address*. IPv6 has no routes over a device that is down."""
    device = "lo" if family is Family.IPV6 and protocol == _RTPROT_STATIC else DEVICE
    header = _RTMSG.pack(family.af, family.bits, 0, 0, _TABLE_LOCAL, protocol, _SCOPE_HOST, _TYPE_LOCAL, 0)
    out = attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(device)))
    return NetlinkRequest(kind, flags, header + attribute(_RTA_DST, address) + out + b"".join(more))


def _send(requests: Sequence[NetlinkRequest], accepted: frozenset[int]) -> None:
    """Send *requests*. Raises HostError about the first refusal with an error that is not *accepted*."""
    with doing(f"change {DEVICE}"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        refused = sock.exchange(requests)
    for _, code in refused:
        if code not in accepted:
            raise HostError(f"cannot change {DEVICE}", OSError(code, ""))


def _index() -> int | None:
    """Return the index of the device; None if it does not exist.

    if_nametoindex() uses an ioctl, for which the kernel runs modprobe twice if there is no such device.
    """
    request = _IFINFOMSG.pack(0, 0, 0, 0, 0) + text_attribute(_IFLA_IFNAME, DEVICE)
    try:
        with NetlinkSocket.open(NETLINK_ROUTE) as sock:
            data, start, _ = sock.request_one(_RTM_GETLINK, request)
        with decoding("an interface"):
            index: int = _IFINFOMSG.unpack_from(data, start)[2]
    except OSError:
        return None
    return index
