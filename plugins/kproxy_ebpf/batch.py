"""Keys and values of the maps as bytes, as bpf/kproxy_bpf/services.c declares them. Pure."""

import struct
import sys
from typing import NamedTuple

from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.endpoint import Destination

_FRONTEND = struct.Struct("=16sQ")
"""Address; port, protocol << 16 and kind << 24."""
_SERVICE = struct.Struct("=IIII")
_ENDPOINT = struct.Struct("=16sHHI")
_CLIENT = struct.Struct("=QQ")
_NUMBER = struct.Struct("=Q")
_CONNECTION = struct.Struct("=16sQQ")
_SETTINGS = struct.Struct("=QII")

_MAPPED = bytes(10) + b"\xff\xff"
_NODE_PORT_KIND = {Family.IPV4: 4, Family.IPV6: 6}
_FAMILY_BIT = 1 << 31

ONLY_NODE_CLIENTS, KEEP_PEER, CONNECTED_UDP, IGNORE_MASQUERADE = 1, 2, 4, 8
"""Flags of the settings."""

MOST_IDS = _FAMILY_BIT - 1
"""Ids of services and of endpoints in each family."""


def address_key(address: Address) -> bytes:
    """Return the 16 bytes of an address, IPv4 as an IPv4-mapped one."""
    return bytes(address) if len(address) == 16 else _MAPPED + address


def frontend_key(address: Address, protocol: Protocol, port: int) -> bytes:
    """Return the key of a frontend with an address."""
    return _FRONTEND.pack(address_key(address), _network(port) | protocol << 16)


def node_port_key(family: Family, protocol: Protocol, port: int) -> bytes:
    """Return the key of a node port."""
    return _FRONTEND.pack(bytes(16), _network(port) | protocol << 16 | _NODE_PORT_KIND[family] << 24)


def frontend_family(key: bytes) -> Family:
    """Return the family of a frontend's or an address's key."""
    kind = _FRONTEND.unpack(key)[1] >> 24 if len(key) == _FRONTEND.size else 0
    if kind:
        return Family.IPV4 if kind == _NODE_PORT_KIND[Family.IPV4] else Family.IPV6
    return Family.IPV4 if key.startswith(_MAPPED) else Family.IPV6


def service_value(
    identity: int, endpoints: int, affinity_seconds: int, *, has_local: bool, masquerades_pods: bool
) -> bytes:
    """Return the value of a frontend. *has_local*: one of its endpoints may be a client itself."""
    return _SERVICE.pack(identity, endpoints, affinity_seconds, has_local | masquerades_pods << 1)


def service_of(value: bytes) -> tuple[int, int]:
    """Return the service's id and number of endpoints of a frontend's value."""
    identity, endpoints, _, _ = _SERVICE.unpack(value)
    return identity, endpoints


class ServiceValue(NamedTuple):
    """The value of a frontend."""

    identity: int
    endpoints: int
    affinity_seconds: int
    masquerades_pods: bool


def parse_service(value: bytes) -> ServiceValue:
    """Return the parts of a frontend's value."""
    identity, endpoints, affinity_seconds, flags = _SERVICE.unpack(value)
    return ServiceValue(identity, endpoints, affinity_seconds, bool(flags & 2))


def parse_endpoint(value: bytes, family: Family) -> Destination:
    """Return the endpoint that `endpoint_value` made bytes of."""
    address, port, _, _ = _ENDPOINT.unpack(value)
    return Destination(Address(address[-family.size:]), _network(port))


def slot_key(service: int, index: int) -> bytes:
    """Return the key of one of a service's slots."""
    return _NUMBER.pack(service | index << 32)


def service_of_slot(key: bytes) -> int:
    """Return the id of the service that a slot belongs to."""
    return parse_number(key) & 0xFFFFFFFF


def number(value: int) -> bytes:
    """Return an id, or a socket's cookie, as a key or a value."""
    return _NUMBER.pack(value)


def parse_number(value: bytes) -> int:
    """Return the id that `number` made bytes of."""
    return int(_NUMBER.unpack(value)[0])


def endpoint_value(address: Address, port: int, *, is_local: bool, service: int) -> bytes:
    """Return the value of an endpoint."""
    return _ENDPOINT.pack(address_key(address), _network(port), is_local, service)


def client_key(namespace: int, service: int) -> bytes:
    """Return the key of a service's client, which is a network namespace, by its cookie."""
    return _CLIENT.pack(namespace, service)


def parse_pin(value: bytes) -> tuple[int, int]:
    """Return when a client was seen last, in nanoseconds of CLOCK_MONOTONIC, and its endpoint's id."""
    seen, endpoint = _CLIENT.unpack(value)
    return seen, endpoint


def parse_connection(value: bytes) -> tuple[Address, int, int]:
    """Return the address (16 bytes), port and endpoint's id to which a socket was connected."""
    address, endpoint, port = _CONNECTION.unpack(value)
    return Address(address), _network(port), endpoint


def settings_value(node_namespace: int, flags: int) -> bytes:
    """Return what all programs read at each call.

    *node_namespace*: the cookie of the node's network namespace.
    """
    return _SETTINGS.pack(node_namespace, flags, 0)


def first_id(family: Family) -> int:
    """Return the lowest id of a family: both share the maps."""
    return 1 if family is Family.IPV4 else _FAMILY_BIT | 1


def id_family(identity: int) -> Family:
    """Return the family that an id belongs to."""
    return Family.IPV6 if identity & _FAMILY_BIT else Family.IPV4


def _network(port: int) -> int:
    """Return *port* such that packing it in host order yields network order."""
    return port if sys.byteorder == "big" else (port & 0xFF) << 8 | port >> 8
