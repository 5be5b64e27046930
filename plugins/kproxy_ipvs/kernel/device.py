"""The dummy interface that holds the addresses of Services (linux/rtnetlink.h, linux/if_addr.h)."""

import errno
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.model.address import Address, Family, format_address
from kproxy_ipvs.kernel.exchange import Request, exchange
from kproxy_ipvs.names import DEVICE

_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR = 20, 21, 22
_RTM_NEWROUTE, _RTM_DELROUTE, _RTM_GETROUTE = 24, 25, 26
_NLM_F_REPLACE, _NLM_F_EXCL, _NLM_F_CREATE = 0x100, 0x200, 0x400
_CREATE = _NLM_F_CREATE | _NLM_F_EXCL
_RTMSG = struct.Struct("=BBBBBBBBI")
_LOOKS, _BETWEEN_LOOKS = 5000, 0.0002
"""How often to look for a route, and seconds between."""
_RTPROT_KERNEL, _RTPROT_STATIC = 2, 4
_TABLE_LOCAL, _TYPE_LOCAL, _SCOPE_HOST = 255, 2, 254
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_NO_DAD = 0x02
_LINK_LOCAL_SCOPE = 253
_IFADDRMSG = struct.Struct("=BBBBI")
_PRESENT = frozenset({errno.EEXIST})
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.ENODEV, errno.ESRCH})


def exists() -> bool:
    """Whether the device is there."""
    return _index() is not None


def ensure() -> bool:
    """Create the device; True if it was not there. Raises HostError."""
    if exists():
        return False
    kind = netlink.nested(_IFLA_LINKINFO, netlink.attribute(_IFLA_INFO_KIND, b"dummy"))
    payload = bytes(16) + netlink.attribute(_IFLA_IFNAME, DEVICE.encode() + b"\0") + kind
    _send([Request(_RTM_NEWLINK, _CREATE, payload)], _PRESENT)
    return True


def delete() -> None:
    """Delete the device with all its addresses, if it is there. Raises HostError."""
    index = _index()
    if index is not None:
        # Routes that `lend_source` has made in this family are not the device's.
        unbind(read(Family.IPV6)[0], Family.IPV6)
        payload = struct.pack("=BxHiII", 0, 0, index, 0, 0)
        _send([Request(_RTM_DELLINK, 0, payload)], _ABSENT)


def read(family: Family) -> tuple[frozenset[Address], frozenset[Address]]:
    """The addresses of *family* on the device, and those on other interfaces. Raises HostError."""
    ours: set[Address] = set()
    others: set[Address] = set()
    index = _index()

    def fill() -> None:
        ours.clear()
        others.clear()
        with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
            header = _IFADDRMSG.pack(family.af, 0, 0, 0, 0)
            request = netlink.message(_RTM_GETADDR, netlink.NLM_F_DUMP, header)
            for data, start, end in netlink.dump(sock, request):
                number, _, _, scope, on = _IFADDRMSG.unpack_from(data, start)
                if number != family.af:
                    continue
                found = netlink.attributes(data, start + _IFADDRMSG.size, end)
                address = Address(found.get(_IFA_LOCAL) or found[_IFA_ADDRESS])
                if on != index:
                    others.add(address)
                elif scope != _LINK_LOCAL_SCOPE or family is Family.IPV4:
                    ours.add(address)

    try:
        netlink.uninterrupted(fill)
    except OSError as error:
        raise HostError(f"addresses can't be read: {error.strerror}") from error
    return frozenset(ours), frozenset(others)


def lend_source(addresses: Iterable[Address], source: Address, family: Family) -> None:
    """Have the node's own new connections to *addresses* come from *source*, not from the address itself.

    Those that come from the address end when that is taken off the device. Raises HostError.
    """
    preferred = netlink.attribute(_RTA_PREFSRC, source)
    requests = []
    for address in addresses:
        if family is Family.IPV4:
            requests.append(_route(_RTM_NEWROUTE, _NLM_F_CREATE | _NLM_F_REPLACE, address, family, preferred))
        else:
            # The kernel's own route has a metric that none of ours can have. Hence not in its place.
            requests.append(_route(_RTM_NEWROUTE, _CREATE, address, family, preferred))
            requests.append(_route(_RTM_DELROUTE, 0, address, family, protocol=_RTPROT_KERNEL))
    _send(requests, _PRESENT | _ABSENT)


def bind(addresses: Iterable[Address], family: Family) -> None:
    """Put *addresses* on the device; some may be there. Raises HostError."""
    addresses = list(addresses)
    _change(_RTM_NEWADDR, _CREATE, addresses, family, _PRESENT)
    if family is Family.IPV6 and addresses:
        _await_local(addresses[-1])


def _await_local(address: Address) -> None:
    """Wait until IPv6 takes what is sent to *address* for the node's own.

    The kernel says that it has an address before it has the route, which it makes in the order of the
    addresses (addrconf_dad_work, net/ipv6/addrconf.c); until then IPVS does not see packets to it.
    """
    header = _RTMSG.pack(Family.IPV6.af, Family.IPV6.bits, 0, 0, 0, 0, 0, 0, 0)
    request = netlink.message(_RTM_GETROUTE, 0, header + netlink.attribute(_RTA_DST, address))
    try:
        with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
            for _ in range(_LOOKS):
                sock.send(request)
                answer = sock.recv(1 << 16)
                for kind, _, _, start, _ in netlink.messages(answer):
                    if kind == _RTM_NEWROUTE and _RTMSG.unpack_from(answer, start)[7] == _TYPE_LOCAL:
                        return
                time.sleep(_BETWEEN_LOOKS)
    except OSError as error:
        raise HostError(f"{DEVICE}: {error.strerror}") from error
    raise HostError(f"{DEVICE}: {format_address(address)} does not become local")


def unbind(addresses: Collection[Address], family: Family) -> None:
    """Take *addresses* off the device; some may be gone. Raises HostError."""
    _change(_RTM_DELADDR, 0, addresses, family, _ABSENT)
    _send([_route(_RTM_DELROUTE, 0, address, family) for address in addresses], _ABSENT)


def _change(
    kind: int, flags: int, addresses: Iterable[Address], family: Family, accepted: frozenset[int]
) -> None:
    addresses = list(addresses)
    if not addresses:
        return
    index = _index()
    if index is None:
        raise HostError(f"{DEVICE} is not there")
    header = _IFADDRMSG.pack(family.af, family.bits, _NO_DAD, 0, index)
    _send([Request(kind, flags, header + _both(address)) for address in addresses], accepted)


def _route(
    kind: int, flags: int, address: Address, family: Family, *more: bytes, protocol: int = _RTPROT_STATIC
) -> Request:
    """About a route that makes *address* a local one. IPv6 has none over a device that is down."""
    device = "lo" if family is Family.IPV6 and protocol == _RTPROT_STATIC else DEVICE
    header = _RTMSG.pack(family.af, family.bits, 0, 0, _TABLE_LOCAL, protocol, _SCOPE_HOST, _TYPE_LOCAL, 0)
    out = netlink.attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(device)))
    return Request(kind, flags, header + netlink.attribute(_RTA_DST, address) + out + b"".join(more))


def _both(address: Address) -> bytes:
    return netlink.attribute(_IFA_LOCAL, address) + netlink.attribute(_IFA_ADDRESS, address)


def _send(requests: Sequence[Request], accepted: frozenset[int]) -> None:
    """Raises HostError if one is refused for a reason that is not *accepted*."""
    try:
        with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
            for _, code in exchange(sock, requests):
                if code not in accepted:
                    netlink.raise_for(code)
    except OSError as error:
        raise HostError(f"{DEVICE}: {error.strerror}") from error


def _index() -> int | None:
    try:
        return socket.if_nametoindex(DEVICE)
    except OSError:
        return None
