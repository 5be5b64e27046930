"""Operations on virtual servers as generic netlink messages of the family IPVS (linux/ip_vs.h)."""

import struct
import sys
from functools import lru_cache
from typing import NamedTuple

from kproxy_core.host.netlink.messages import NLA_F_NESTED, attribute, nested, text, text_attribute
from kproxy_core.model.address import FAMILY_BY_AF, Address, Family
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.wanted import Scheduling, ServerKey

GENERIC = struct.Struct("=BBH")
"""genlmsghdr: command, version, reserved. Begins the payload of generic netlink messages."""

_NEW_SERVICE, _SET_SERVICE, _DELETE_SERVICE, _GET_SERVICE = 1, 2, 3, 4
_NEW_DEST, _SET_DEST, _DELETE_DEST, _GET_DEST = 5, 6, 7, 8
_SET_CONFIG = 12
_VERSION = 1

_FLAGS = 0x1 | 0x4 | 0x8 | 0x10 | 0x20
"""All flags that can be set: persistence, one packet scheduling and the scheduler's own."""

_NETMASK = {Family.IPV4: b"\xff\xff\xff\xff", Family.IPV6: struct.pack("=I", 128)}


class PutServer(NamedTuple):
    """Creates a virtual server, or changes its scheduling."""

    key: ServerKey
    scheduling: Scheduling
    new: bool


class PutDestination(NamedTuple):
    """Creates a real server, or changes its weight."""

    key: ServerKey
    where: Destination
    weight: int
    new: bool


class DeleteDestination(NamedTuple):
    key: ServerKey
    where: Destination


class DeleteServer(NamedTuple):
    key: ServerKey


Operation = PutServer | PutDestination | DeleteDestination | DeleteServer


class Listed(NamedTuple):
    """A real server as the kernel lists it."""

    where: Destination
    weight: int
    active: int
    """Connections that are being opened or are open."""
    inactive: int
    """Connections that are being closed or were closed recently; with UDP, all connections."""

    @property
    def connections(self) -> int:
        return self.active + self.inactive


def encode(operation: Operation) -> bytes:
    match operation:
        case PutServer(key, scheduling, new):
            return _payload(_NEW_SERVICE if new else _SET_SERVICE, _service(key, scheduling))
        case PutDestination(key, where, weight, new):
            return _payload(_NEW_DEST if new else _SET_DEST, _named(key) + _destination(key, where, weight))
        case DeleteDestination(key, where):
            return _payload(_DELETE_DEST, _named(key) + _destination(key, where))
        case DeleteServer(key):
            return _payload(_DELETE_SERVICE, _service(key))


def dump_servers() -> bytes:
    return _payload(_GET_SERVICE, b"")


def dump_destinations(key: ServerKey) -> bytes:
    return _payload(_GET_DEST, _service(key))


def set_timeouts(tcp: int, tcp_fin: int, udp: int) -> bytes:
    """Encode the timeouts of connections in seconds; 0 keeps the kernel's value."""
    values = ((4, tcp), (5, tcp_fin), (6, udp))
    return _payload(_SET_CONFIG, b"".join(_u32(kind, value) for kind, value in values))


def decode_server(attributes: dict[int, bytes]) -> tuple[ServerKey, Scheduling] | None:
    """Decode the attributes within IPVS_CMD_ATTR_SERVICE; None for an unknown address family."""
    family = FAMILY_BY_AF.get(_number(attributes.get(1, b"")))
    if family is None:
        return None
    if mark := _number(attributes.get(5, b"")):
        key = ServerKey.marked(family, mark)
    else:
        address = Address(attributes.get(3, b"")[: family.size])
        protocol = _number(attributes.get(2, b""))
        key = ServerKey(family, 0, address, protocol, int.from_bytes(attributes.get(4, b""), "big"))
    flags, _ = struct.unpack("=II", attributes[7])
    return key, Scheduling(text(attributes.get(6, b"")), flags & _FLAGS, _number(attributes[8]))


def decode_destination(family: Family, attributes: dict[int, bytes]) -> Listed:
    """Decode the attributes within IPVS_CMD_ATTR_DEST."""
    where = Destination(Address(attributes[1][: family.size]), int.from_bytes(attributes[2], "big"))
    return Listed(where, *(_number(attributes[kind]) for kind in (4, 7, 8)))


def _service(key: ServerKey, scheduling: Scheduling | None = None) -> bytes:
    parts = [_u16(1, key.family.af)]
    if key.address is None:
        parts.append(_u32(5, key.mark))
    else:
        parts += [
            _u16(2, key.protocol), attribute(3, key.address.ljust(16, b"\0")),
            attribute(4, key.port.to_bytes(2, "big")),
        ]  # fmt: skip
    if scheduling is not None:
        parts += [
            text_attribute(6, scheduling.scheduler),
            attribute(7, struct.pack("=II", scheduling.flags, _FLAGS)),
            _u32(8, scheduling.timeout),
            attribute(9, _NETMASK[key.family]),
        ]
    return nested(1, *parts)


@lru_cache(maxsize=8)
def _named(key: ServerKey) -> bytes:
    """Encode a virtual server's identity, which is the same for all its real servers."""
    return _service(key)


# Real servers are the most numerous, so each is packed at once: attributes with address, port, forwarding
# method (0: NAT), weight, two thresholds (none) and address family.
_DESTINATION = struct.Struct("=HH HH16s HH2s2x HHI HHI HHI HHI HHH2x")


def _destination(key: ServerKey, where: Destination, weight: int = 0) -> bytes:
    """Encode a real server. To delete one, the kernel uses its address, port and address family only."""
    return _DESTINATION.pack(
        _DESTINATION.size, 2 | NLA_F_NESTED, 20, 1, where.address, 6, 2, where.port.to_bytes(2, "big"),
        8, 3, 0, 8, 4, weight, 8, 5, 0, 8, 6, 0, 6, 11, key.family.af,
    )  # fmt: skip


def _payload(command: int, attributes: bytes) -> bytes:
    return GENERIC.pack(command, _VERSION, 0) + attributes


def _u16(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=H", value))


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _number(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)
