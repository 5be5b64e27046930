"""Keys and values of the maps as bytes, as bpf/kproxy_bpf/services.c declares them. Pure."""

import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from kproxy_core.contract import Address, Destination, Family, Protocol
from kproxy_ebpf import names

_FRONTEND = struct.Struct("=16sQ")
"""Address; port, protocol << 16 and kind << 24."""
_SERVICE = struct.Struct("=8sIIIxxxx")
_ENDPOINT = struct.Struct("=16sQ")
"""Address; port, and is local << 16."""
_NUMBER = struct.Struct("=Q")
_COUNTS = struct.Struct("=17Q")
_SETTINGS = struct.Struct("=QII")
_NUMBERS = [_NUMBER.pack(number) for number in range(64)]
_SERVICE_ID = 8
"""Bytes of a service's id."""

_MAPPED = bytes(10) + b"\xff\xff"
_NODE_PORT_KIND = {Family.IPV4: 4, Family.IPV6: 6}
_IS_LOCAL = 1 << 16

ONLY_NODE_CLIENTS, KEEP_PEER, CONNECTED_UDP, COUNT_CONNECTIONS = 1, 2, 4, 8
"""Flags of the settings."""
_HAS_LOCAL = 1
MASQUERADES_PODS = 2
"""Flag of a frontend: the rules give traffic of pods the node's address as source."""
SHORT_CIRCUITS = {Family.IPV4: 4, Family.IPV6: 8}
"""Flag of a frontend with policy Local: the rules send pods to all endpoints, and other clients to those on
this node."""

RESETS = 16
"""Flag of a frontend: its connections to removed endpoints are reset. Those of pods are left to the rules, as
this process may not enter the network namespaces of pods."""

Counts = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of `Connections`: `number`, `failed`, `carried`, and `handshakes`."""

PRESENT = bytes(8)
"""The value of an endpoint, and of an address of the node."""


def address_key(address: Address) -> bytes:
    """Return the 16 bytes of an address, IPv4 as an IPv4-mapped one."""
    return bytes(address) if len(address) == 16 else _MAPPED + address


def frontend_key(address: Address, protocol: Protocol, port: int) -> bytes:
    return _FRONTEND.pack(address_key(address), _network(port) | protocol << 16)


def node_port_key(family: Family, protocol: Protocol, port: int) -> bytes:
    return _FRONTEND.pack(bytes(16), _network(port) | protocol << 16 | _NODE_PORT_KIND[family] << 24)


def frontend_family(key: bytes) -> Family:
    kind = _FRONTEND.unpack(key)[1] >> 24 if len(key) == _FRONTEND.size else 0
    if kind:
        return Family.IPV4 if kind == _NODE_PORT_KIND[Family.IPV4] else Family.IPV6
    return Family.IPV4 if key.startswith(_MAPPED) else Family.IPV6


def service_id(name: str, family: Family) -> bytes:
    """Return the id of a service, which depends on its name and family only."""
    digest = blake2b(name.encode(), digest_size=_SERVICE_ID).digest()
    return digest[:-1] + bytes([digest[-1] & 0x7F | (family is Family.IPV6) << 7])


def id_family(service: bytes) -> Family:
    return Family.IPV6 if service[-1] & 0x80 else Family.IPV4


FAMILY_OF_KEY: dict[str, Callable[[bytes], Family]] = {
    names.FRONTENDS: frontend_family,
    names.SLOTS: lambda key: id_family(key[:_SERVICE_ID]),
    names.ENDPOINTS: lambda key: id_family(key[-_SERVICE_ID:]),
    names.NODE_ADDRESSES: frontend_family,
    names.OWN_ADDRESSES: frontend_family,
}
"""The family of an element by its key, for the maps `names.PER_FAMILY`."""


class ServiceValue(NamedTuple):
    identity: bytes
    endpoints: int
    affinity_seconds: int
    has_local: bool
    """An endpoint may be a client itself."""
    frontend: int
    """Flags of the frontend."""

    def encode(self) -> bytes:
        flags = self.frontend | _HAS_LOCAL * self.has_local
        return _SERVICE.pack(self.identity, self.endpoints, self.affinity_seconds, flags)


def parse_service(value: bytes) -> ServiceValue:
    identity, endpoints, affinity_seconds, flags = _SERVICE.unpack(value)
    return ServiceValue(identity, endpoints, affinity_seconds, bool(flags & _HAS_LOCAL), flags & ~_HAS_LOCAL)


def slot_key(service: bytes, index: int) -> bytes:
    return service + _NUMBERS[index] if index < len(_NUMBERS) else service + _NUMBER.pack(index)


def parse_frontend(key: bytes) -> tuple[Address, Protocol, int]:
    """Return the address, protocol and port that a frontend's key with an address begins with."""
    address, rest = _FRONTEND.unpack_from(key)
    family = frontend_family(key[:_FRONTEND.size])
    return Address(address[-family.size:]), Protocol(rest >> 16 & 0xFF), _network(rest & 0xFFFF)


def split_pair(key: bytes) -> tuple[bytes, bytes]:
    """Return the frontend's key and the endpoint, as in slots, of a counted pair."""
    return key[:_FRONTEND.size], key[_FRONTEND.size:]


def parse_counts(value: bytes) -> Counts:
    numbers = _COUNTS.unpack(value)
    bytes_to, bytes_from, packets_to, packets_from = numbers[4:8]
    return numbers[0], numbers[1:4], (packets_to, bytes_to, packets_from, bytes_from), numbers[8:]


def parse_peer(value: bytes) -> tuple[bytes, bytes] | None:
    """Return the frontend's key and the endpoint, as in slots, of a socket's value; None: it has none."""
    return split_pair(value) if len(value) == _FRONTEND.size + _ENDPOINT.size else None


def endpoint_value(endpoint: Destination, *, is_local: bool) -> bytes:
    address, port = endpoint
    return (address if len(address) == 16 else _MAPPED + address) + _port(port, is_local)


@lru_cache(1024)
def _port(port: int, is_local: bool) -> bytes:
    return _NUMBER.pack(_network(port) | _IS_LOCAL * is_local)


def parse_endpoint(value: bytes, family: Family) -> Destination:
    """Return the endpoint that a slot's value or an endpoint's key begins with."""
    address, port = _ENDPOINT.unpack_from(value)
    return Destination(Address(address[-family.size:]), _network(port & 0xFFFF))


def endpoint_key(value: bytes, service: bytes) -> bytes:
    return value + service


def endpoint_key_of_slot(key: bytes, value: bytes) -> bytes:
    return value + key[:_SERVICE_ID]


def client_key(namespace: int, service: bytes) -> bytes:
    """Return the key of a service's client, which is a network namespace, by its cookie."""
    return _NUMBER.pack(namespace) + service


def parse_pin(value: bytes) -> tuple[int, bytes]:
    """Return when a client was seen last, in nanoseconds of CLOCK_MONOTONIC, and its endpoint as in slots."""
    return _NUMBER.unpack_from(value)[0], value[_NUMBER.size:]


def parse_number(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)


def cookie_key(cookie: int) -> bytes:
    return _NUMBER.pack(cookie)


def settings_value(node_namespace: int, flags: int, pods_left: int) -> bytes:
    """Return the settings that all programs read at each call.

    *node_namespace*: the cookie of the node's network namespace. *pods_left*: flags of frontends for which
    sockets of pods are left to the rules.
    """
    return _SETTINGS.pack(node_namespace, flags, pods_left)


def _network(port: int) -> int:
    """Return *port* such that packing it in host order yields network order."""
    return port if sys.byteorder == "big" else (port & 0xFF) << 8 | port >> 8
