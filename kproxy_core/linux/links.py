"""The network interfaces of this namespace (linux/if_link.h)."""

import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kproxy_core.linux.errors import doing
from kproxy_core.netlink.messages import NETLINK_ROUTE, Span, attributes, decoding, text
from kproxy_core.netlink.sockets import NetlinkSocket

_RTM_GETLINK: Final = 18
_IFINFOMSG: Final = struct.Struct("=BxHiII")
_NAME, _MTU, _MASTER, _LINKINFO, _PEER_NAMESPACE = 3, 4, 10, 18, 37
_KIND, _DATA, _PORT_DATA = 1, 2, 5
_HAIRPIN, _CALLS_IP, _CALLS_IP6 = 4, 36, 37
"""IFLA_BRPORT_MODE; IFLA_BR_NF_CALL_IPTABLES and _IP6TABLES."""
_UP, _LOOPBACK, _RUNNING, _PROMISCUOUS = 0x1, 0x8, 0x40, 0x100


class Link(NamedTuple):
    number: int
    name: str
    kind: str
    """``veth``, ``bridge``, ``vxlan``, ...; "" of hardware and of loopback."""
    mtu: int = 1500
    master: int = 0
    """The number of the bridge or bond that it is a port of; 0: none."""
    is_up: bool = True
    is_loopback: bool = False
    is_promiscuous: bool = False
    leads_elsewhere: bool = False
    """Its other end is in another network namespace, as that of a pod is."""
    has_hairpin: bool = False
    """Of a bridge's port: frames may leave by the port that they arrived at."""
    has_carrier: bool = True
    """It is up and can send, as far as its driver knows (IFF_RUNNING)."""
    calls: tuple[bool, bool] = False, False
    """Of a bridge: whether it sends IPv4 and IPv6 packets through netfilter by itself."""


def read_links() -> list[Link]:
    """Return all interfaces. Raises HostError."""
    with doing("read the interfaces"), NetlinkSocket.open(NETLINK_ROUTE) as sock:
        return sock.dump(_RTM_GETLINK, bytes(_IFINFOMSG.size), lambda answers: [*parse(answers)])


def unaddressed_links(links: Iterable[Link], numbered: Collection[int]) -> list[str]:
    """Return the names of the interfaces of pods that have no address. *numbered*: those that have one.

    Packets of a bridge's port arrive by the bridge.
    """
    return [
        link.name for link in links
        if link.is_up and link.leads_elsewhere and link.kind in ("veth", "netkit") and not link.master
        and link.number not in numbered]


def shortened(interfaces: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(interfaces) - most} more" if len(interfaces) > most else ""
    return f"{', '.join(interfaces[:most])}{more}"


def parse(answers: Iterator[Span]) -> Iterator[Link]:
    """Yield the interface in each of *answers*. Raises Malformed."""
    with decoding("an interface"):
        for data, start, end in answers:
            _, _, number, flags, _ = _IFINFOMSG.unpack_from(data, start)
            found = attributes(data, start + _IFINFOMSG.size, end)
            about = attributes(found.get(_LINKINFO, b""))
            own, port = attributes(about.get(_DATA, b"")), attributes(about.get(_PORT_DATA, b""))
            kind = text(about.get(_KIND, b""))
            is_bridge = kind == "bridge"
            yield Link(
                number, text(found[_NAME]), kind,
                _number(found.get(_MTU, b"")), _number(found.get(_MASTER, b"")),
                is_up=bool(flags & _UP), is_loopback=bool(flags & _LOOPBACK),
                is_promiscuous=bool(flags & _PROMISCUOUS), leads_elsewhere=_PEER_NAMESPACE in found,
                has_carrier=flags & (_UP | _RUNNING) == _UP | _RUNNING,
                has_hairpin=any(port.get(_HAIRPIN, b"")),
                calls=(is_bridge and any(own.get(_CALLS_IP, b"")),
                       is_bridge and any(own.get(_CALLS_IP6, b""))))


def _number(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)
