"""The dummy interface that holds the addresses of Services (linux/rtnetlink.h, linux/if_addr.h)."""

import errno
import socket
import struct
from collections.abc import Iterable, Sequence

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import netlink
from kproxy_core.model.address import Address, Family
from kproxy_ipvs.exchange import Request, exchange
from kproxy_ipvs.names import DEVICE

_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_RTM_NEWADDR, _RTM_DELADDR, _RTM_GETADDR = 20, 21, 22
_CREATE = 0x400 | 0x200
"""NLM_F_CREATE and NLM_F_EXCL."""
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_NO_DAD = 0x02
_LINK_LOCAL_SCOPE = 253
_AF = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_IFADDRMSG = struct.Struct("=BBBBI")
_PRESENT, _ABSENT = frozenset({errno.EEXIST}), frozenset({errno.EADDRNOTAVAIL, errno.ENODEV})


def exists() -> bool:
    """Whether the device is there."""
    return _index() is not None


def ensure() -> bool:
    """Create the device; True if it was not there. Raises SyncFailed."""
    if exists():
        return False
    kind = netlink.nested(_IFLA_LINKINFO, netlink.attribute(_IFLA_INFO_KIND, b"dummy"))
    payload = bytes(16) + netlink.attribute(_IFLA_IFNAME, DEVICE.encode() + b"\0") + kind
    _send([Request(_RTM_NEWLINK, _CREATE, payload)], _PRESENT)
    return True


def delete() -> None:
    """Delete the device with all its addresses, if it is there. Raises SyncFailed."""
    index = _index()
    if index is not None:
        payload = struct.pack("=BxHiII", 0, 0, index, 0, 0)
        _send([Request(_RTM_DELLINK, 0, payload)], _ABSENT)


def read(family: Family) -> tuple[frozenset[Address], frozenset[Address]]:
    """The addresses of *family* on the device, and those on other interfaces. Raises SyncFailed."""
    ours: set[Address] = set()
    others: set[Address] = set()
    index = _index()

    def fill() -> None:
        ours.clear()
        others.clear()
        with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
            header = _IFADDRMSG.pack(_AF[family], 0, 0, 0, 0)
            request = netlink.message(_RTM_GETADDR, netlink.NLM_F_DUMP, header)
            for data, start, end in netlink.dump(sock, request):
                number, _, _, scope, on = _IFADDRMSG.unpack_from(data, start)
                if number != _AF[family]:
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
        raise SyncFailed(f"addresses can't be read: {error.strerror}") from error
    return frozenset(ours), frozenset(others)


def bind(addresses: Iterable[Address], family: Family) -> None:
    """Put *addresses* on the device; some may be there. Raises SyncFailed."""
    _change(_RTM_NEWADDR, _CREATE, addresses, family, _PRESENT)


def unbind(addresses: Iterable[Address], family: Family) -> None:
    """Take *addresses* off the device; some may be gone. Raises SyncFailed."""
    _change(_RTM_DELADDR, 0, addresses, family, _ABSENT)


def _change(
    kind: int, flags: int, addresses: Iterable[Address], family: Family, accepted: frozenset[int]
) -> None:
    addresses = list(addresses)
    if not addresses:
        return
    index = _index()
    if index is None:
        raise SyncFailed(f"{DEVICE} is not there")
    header = _IFADDRMSG.pack(_AF[family], family.bits, _NO_DAD, 0, index)
    _send([Request(kind, flags, header + _both(address)) for address in addresses], accepted)


def _both(address: Address) -> bytes:
    return netlink.attribute(_IFA_LOCAL, address) + netlink.attribute(_IFA_ADDRESS, address)


def _send(requests: Sequence[Request], accepted: frozenset[int]) -> None:
    """Raises SyncFailed if one is refused for a reason that is not *accepted*."""
    try:
        with netlink.open_socket(netlink.NETLINK_ROUTE) as sock:
            for _, code in exchange(sock, requests):
                if code not in accepted:
                    netlink.raise_for(code)
    except OSError as error:
        raise SyncFailed(f"{DEVICE}: {error.strerror}") from error


def _index() -> int | None:
    try:
        return socket.if_nametoindex(DEVICE)
    except OSError:
        return None
