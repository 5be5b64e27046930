"""Operations on virtual servers and their encoding (linux/ip_vs.h, the generic netlink family IPVS)."""

import struct
from functools import lru_cache
from typing import NamedTuple

from kproxy_core.model.address import FAMILY_BY_AF, Address, Family
from kproxy_core.model.endpoint import Destination
from kproxy_ipvs.wanted import Scheduling, ServerKey

NEW_SERVICE, SET_SERVICE, DELETE_SERVICE, GET_SERVICE = 1, 2, 3, 4
NEW_DEST, SET_DEST, DELETE_DEST, GET_DEST = 5, 6, 7, 8
SET_CONFIG = 12

_FLAGS = 0x1 | 0x4 | 0x8 | 0x10 | 0x20
"""Persistence, one packet scheduling and the scheduler's own: all that can be set."""

_NETMASK = {Family.IPV4: b"\xff\xff\xff\xff", Family.IPV6: struct.pack("=I", 128)}
_GENERIC = struct.Struct("=BBH")
_VERSION = 1


class PutServer(NamedTuple):
    """Create a virtual server, or change how it schedules."""

    key: ServerKey
    scheduling: Scheduling
    new: bool


class PutDestination(NamedTuple):
    """Create a real server, or change its weight."""

    key: ServerKey
    where: Destination
    weight: int
    new: bool


class DeleteDestination(NamedTuple):
    key: ServerKey
    where: Destination


class DeleteServer(NamedTuple):
    """Delete a virtual server and its real servers."""

    key: ServerKey


Operation = PutServer | PutDestination | DeleteDestination | DeleteServer


class Body(NamedTuple):
    """A generic netlink message without its netlink header."""

    command: int
    payload: bytes


def encode(operation: Operation) -> Body:
    """The message that does *operation*."""
    match operation:
        case PutServer(key, scheduling, new):
            return _body(NEW_SERVICE if new else SET_SERVICE, _service(key, scheduling))
        case PutDestination(key, where, weight, new):
            return _body(NEW_DEST if new else SET_DEST, _named(key) + _weighed(key, where, weight))
        case DeleteDestination(key, where):
            return _body(DELETE_DEST, _named(key) + _destination(key, where))
        case DeleteServer(key):
            return _body(DELETE_SERVICE, _service(key))


def dump_servers() -> Body:
    """Ask for all virtual servers."""
    return _body(GET_SERVICE, b"")


def dump_destinations(key: ServerKey) -> Body:
    """Ask for the real servers of *key*."""
    return _body(GET_DEST, _service(key))


def set_timeouts(tcp: int, tcp_fin: int, udp: int) -> Body:
    """Set the timeouts of connections, in seconds; 0 leaves one as it is."""
    values = ((4, tcp), (5, tcp_fin), (6, udp))
    return _body(SET_CONFIG, b"".join(_u32(kind, value) for kind, value in values))


def decode_server(attributes: dict[int, bytes]) -> tuple[ServerKey, Scheduling] | None:
    """A virtual server from the attributes within IPVS_CMD_ATTR_SERVICE; None if we can't know it."""
    family = FAMILY_BY_AF.get(_u16(attributes.get(1, b"")))
    if family is None:
        return None
    if mark := int.from_bytes(attributes.get(5, b""), "little" if _LITTLE else "big"):
        key = ServerKey(family, mark, None, 0, 0)
    else:
        address = Address(attributes.get(3, b"")[: family.size])
        protocol = _u16(attributes.get(2, b""))
        key = ServerKey(family, 0, address, protocol, int.from_bytes(attributes.get(4, b""), "big"))
    flags, _ = struct.unpack("=II", attributes[7])
    (timeout,) = struct.unpack("=I", attributes[8])
    scheduler = attributes.get(6, b"").rstrip(b"\0").decode(errors="replace")
    return key, Scheduling(scheduler, flags & _FLAGS, timeout)


class Listed(NamedTuple):
    """A real server as the kernel has it."""

    where: Destination
    weight: int
    active: int
    """Connections that are being opened or are open."""
    inactive: int
    """Connections that are being closed or were closed lately; with UDP, all."""

    @property
    def connections(self) -> int:
        return self.active + self.inactive


def decode_destination(family: Family, attributes: dict[int, bytes]) -> Listed:
    """A real server from the attributes within IPVS_CMD_ATTR_DEST."""
    address = Address(attributes[1][: family.size])
    weight, active, inactive = (struct.unpack("=I", attributes[kind])[0] for kind in (4, 7, 8))
    return Listed(Destination(address, int.from_bytes(attributes[2], "big")), weight, active, inactive)


def _service(key: ServerKey, scheduling: Scheduling | None = None) -> bytes:
    parts = _attribute(1, struct.pack("=H", key.family.af))
    if key.address is None:
        parts += _u32(5, key.mark)
    else:
        parts += _attribute(2, struct.pack("=H", key.protocol))
        parts += _attribute(3, key.address.ljust(16, b"\0"))
        parts += _attribute(4, struct.pack(">H", key.port))
    if scheduling is not None:
        parts += _attribute(6, scheduling.scheduler.encode() + b"\0")
        parts += _attribute(7, struct.pack("=II", scheduling.flags, _FLAGS))
        parts += _u32(8, scheduling.timeout)
        parts += _attribute(9, _NETMASK[key.family])
    return _attribute(1 | _NESTED, parts)


@lru_cache(maxsize=8)
def _named(key: ServerKey) -> bytes:
    """The same for all real servers of one, which mostly come one after the other."""
    return _service(key)


def _destination(key: ServerKey, where: Destination) -> bytes:
    parts = _attribute(1, where.address.ljust(16, b"\0")) + _attribute(2, struct.pack(">H", where.port))
    parts += _attribute(11, struct.pack("=H", key.family.af))
    return _attribute(2 | _NESTED, parts)


# There are as many of these as endpoints of all frontends, so each is packed at once: attributes that
# are address, port, forwarding method (0: NAT), weight, two thresholds (none), address family.
_WEIGHED = struct.Struct("=HH HH16s HH2s2x HHI HHI HHI HHI HHH2x")


def _weighed(key: ServerKey, where: Destination, weight: int) -> bytes:
    return _WEIGHED.pack(
        _WEIGHED.size, 2 | _NESTED, 20, 1, where.address, 6, 2, where.port.to_bytes(2, "big"),
        8, 3, 0, 8, 4, weight, 8, 5, 0, 8, 6, 0, 6, 11, key.family.af,
    )  # fmt: skip


_NESTED = 0x8000
_LITTLE = struct.pack("=H", 1) == b"\1\0"
_HEADER = struct.Struct("=HH")


def _body(command: int, payload: bytes) -> Body:
    return Body(command, _GENERIC.pack(command, _VERSION, 0) + payload)


def _attribute(kind: int, value: bytes) -> bytes:
    return _HEADER.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def _u32(kind: int, value: int) -> bytes:
    return _HEADER.pack(8, kind) + struct.pack("=I", value)


def _u16(value: bytes) -> int:
    return int(struct.unpack("=H", value)[0]) if len(value) == 2 else 0
