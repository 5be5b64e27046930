"""IP addresses, networks and transport protocols as small packed values. Text exists only at the edges."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable
from socket import inet_ntoa
from typing import Final, NamedTuple, NewType

Address = NewType("Address", bytes)
"""A packed IP address: 4 bytes (IPv4) or 16 bytes (IPv6), network order."""
Socket = tuple[Address, int]
"""Address and port; a `Destination` is one."""

_pack: Callable[[int, str], Address] = socket.inet_pton  # type: ignore[assignment]
_IPV4, _IPV6 = int(socket.AF_INET), int(socket.AF_INET6)
_MAPPED_PREFIX = bytes(10) + b"\xff\xff"


class Protocol(enum.IntEnum):
    """A transport protocol; the value is its IP protocol number."""

    TCP = socket.IPPROTO_TCP
    UDP = socket.IPPROTO_UDP
    SCTP = socket.IPPROTO_SCTP


class Cidr(NamedTuple):
    """An IP network: its (masked) network address and prefix length in bits."""

    network: Address
    prefix: int

    @property
    def family(self) -> Family:
        return family_of(self.network)

    def __contains__(self, address: object) -> bool:
        if not isinstance(address, bytes) or len(address) != len(self.network):
            return False
        return _masked(address, self.prefix) == self.network

    def __str__(self) -> str:
        return f"{format_address(self.network)}/{self.prefix}"

    @property
    def listed(self) -> str:
        """The text that nft and ipset print, and `parse_network` reads: one address has no prefix length."""
        return str(self).removesuffix(f"/{self.family.bits}")


def family_of(address: Address) -> Family:
    return Family.IPV4 if len(address) == 4 else Family.IPV6


def parse_address(text: str) -> Address:
    """Return the packed form of *text*. Raises ValueError if it is not an IP address, or has a zone.

    As kube-proxy reads addresses: leading zeros in IPv4 octets are decimal (``172.30.0.041`` is
    ``172.30.0.41``), an IPv4-mapped IPv6 address is IPv4.
    """
    try:
        if ":" not in text:
            return _pack(_IPV4, text)
        if "%" not in text:
            packed = _pack(_IPV6, text)
            return Address(packed[12:]) if packed.startswith(_MAPPED_PREFIX) else packed
    except (OSError, ValueError):
        octets = text.split(".")
        if len(octets) == 4 and all(o.isascii() and o.isdigit() for o in octets):
            numbers = [int(octet[-4:]) if not octet[:-4].strip("0") else 256 for octet in octets]
            if max(numbers) < 256:
                return Address(bytes(numbers))
    raise ValueError(f"{text!r} is not an IP address")


def format_address(address: Address) -> str:
    return socket.inet_ntop(family_of(address).af, address)


def parse_cidr(text: str) -> Cidr:
    """Return the network that *text* names, ``address/prefix``, without host bits. Raises ValueError."""
    head, slash, tail = text.partition("/")
    if slash and tail.isascii() and tail.isdigit() and len(tail) < 10:
        address, prefix = parse_address(head), int(tail)
        if prefix <= len(address) * 8 and (":" in head) == (len(address) == 16):
            return Cidr(_masked(address, prefix), prefix)
    raise ValueError(f"{text!r} is not a CIDR")


def parse_network(text: str) -> Cidr:
    """Return the network that *text* names, ``address/prefix`` or one address. Raises ValueError."""
    return parse_cidr(text if "/" in text else f"{text}/{len(parse_address(text)) * 8}")


def outermost(cidrs: Iterable[Cidr]) -> tuple[Cidr, ...]:
    """Return *cidrs* without those contained in another, IPv4 first, sorted by address."""
    kept: list[Cidr] = []
    for cidr in sorted(cidrs, key=lambda cidr: (len(cidr.network), cidr)):
        # A network sorts after every network that contains it, with only further contained ones in between.
        if not (kept and cidr.network in kept[-1]):
            kept.append(cidr)
    return tuple(kept)


def is_loopback(address: Address) -> bool:
    return address[0] == 127 if len(address) == 4 else address == Family.IPV6.loopback


def is_link_local(address: Address) -> bool:
    """Return whether *address* is one of those that IPv6 gives each interface."""
    return len(address) == 16 and address.startswith(b"\xfe\x80")


def format_socket(address: Address, port: int) -> str:
    """Return ``address:port``, with IPv6 in brackets."""
    if len(address) == 4:
        return f"{inet_ntoa(address)}:{port}"
    return f"[{format_address(address)}]:{port}"


def _masked(address: bytes, prefix: int) -> Address:
    spare = len(address) * 8 - prefix
    value = int.from_bytes(address, "big") >> spare << spare
    return Address(value.to_bytes(len(address), "big"))


class Family(enum.Enum):
    """An IP family, with its constants. The value is the name in Kubernetes objects."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"

    __hash__ = object.__hash__  # Enum's is a Python function.

    def __init__(self, label: str) -> None:
        ipv4 = label == "IPv4"
        self.label = label
        self.size = 4 if ipv4 else 16
        """Bytes of an address."""
        self.bits = self.size * 8
        self.af = socket.AF_INET if ipv4 else socket.AF_INET6
        """The address family of sockets and netlink messages; netfilter's NFPROTO numbers are the same."""
        self.ip = "ip" if ipv4 else "ip6"
        """The family in the names of nft, iptables and their kernel modules."""
        self.unspecified = Address(bytes(self.size))
        self.no_source = Cidr(Address(b"\xff" * self.size), self.bits)
        """A network in which no sender can be: the broadcast address, or a multicast one."""
        self.loopback = parse_address("127.0.0.1" if ipv4 else "::1")
        self.loopback_cidr = parse_cidr("127.0.0.0/8" if ipv4 else "::1/128")


FAMILY_BY_AF: Final[dict[int, Family]] = {int(family.af): family for family in Family}
