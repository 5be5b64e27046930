"""Encoding and decoding of netlink messages (linux/netlink.h, linux/netfilter/nfnetlink.h). Pure."""

import errno
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from kproxy_core.model.address import Family

NETLINK_ROUTE: Final = 0
NETLINK_SOCK_DIAG: Final = 4
NETLINK_NETFILTER: Final = 12
NETLINK_GENERIC: Final = 16

NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
SOCK_DIAG_BY_FAMILY: Final = 20
"""The kind of requests of NETLINK_SOCK_DIAG, and of their answers."""
NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_DUMP_INTR: Final = 0x10
NLM_F_REPLACE: Final = 0x100
NLM_F_EXCL: Final = 0x200
NLM_F_DUMP: Final = 0x300
NLM_F_CREATE: Final = 0x400

NLA_F_NESTED: Final = 0x8000
NLA_F_NET_BYTEORDER: Final = 0x4000

HEADER: Final = struct.Struct("=IHHII")
"""nlmsghdr: length, kind, flags, sequence number, port."""
NFGENMSG: Final = struct.Struct("=BBH")
"""Begins the payload of nfnetlink messages: address family, version, resource (in network order)."""
_ATTRIBUTE = struct.Struct("=HH")
_CODE = struct.Struct("=i")

_LONGEST: Final = 0xFFFF - _ATTRIBUTE.size
"""Limit in bytes for the value of an attribute, whose length field has 16 bits."""

Span = tuple[bytes, int, int]
"""A payload: ``data[start:end]``, not copied."""


class TooLong(OSError):
    """A value does not fit into an attribute. Split lists with `fitting`."""

    def __init__(self, problem: str) -> None:
        super().__init__(errno.EMSGSIZE, problem)

    def __str__(self) -> str:
        return str(self.strerror)


class Malformed(OSError):
    """A message from the kernel is cut short, or holds fields in a form that kproxy does not know."""

    def __init__(self, problem: str) -> None:
        super().__init__(errno.EPROTO, f"netlink message not understood: {problem}")


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turn the errors of a decoder into Malformed. Within a generator, errors of its consumer are unaffected.

    Decoders read fields as if they had the sizes of the kernel's headers. Checking each one would take longer
    than the decoding.
    """
    try:
        yield
    except (struct.error, LookupError, ValueError, ArithmeticError) as error:
        raise Malformed(f"{what}: {error!r}") from error


class NetlinkRequest(NamedTuple):
    """A message without its header."""

    kind: int
    flags: int
    payload: bytes
    """Padded to four bytes, as headers and attributes are."""


def message(kind: int, flags: int, payload: bytes, sequence: int = 0) -> bytes:
    """Encode one request. *payload* must be padded; see `NetlinkRequest`."""
    return HEADER.pack(HEADER.size + len(payload), kind, flags | NLM_F_REQUEST, sequence, 0) + payload


def attribute(kind: int, value: bytes) -> bytes:
    """Encode one attribute, padded to four bytes. Raises TooLong."""
    if len(value) > _LONGEST:
        raise TooLong(f"attribute {kind & 0x3FFF} has {len(value)} bytes, netlink allows {_LONGEST}")
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def text_attribute(kind: int, text: str) -> bytes:
    """Encode an attribute that holds a NUL-terminated string."""
    return attribute(kind, text.encode() + b"\0")


def u32(value: int) -> bytes:
    """Encode a number of four bytes in network order."""
    return value.to_bytes(4, "big")


def u32_attribute(kind: int, value: int) -> bytes:
    return attribute(kind, u32(value))


def nested(kind: int, *attributes: bytes) -> bytes:
    """Encode one attribute that holds *attributes*. Raises TooLong; see `fitting`."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def fitting(parts: Sequence[bytes]) -> Iterator[slice]:
    """Yield the slices of encoded *parts*, in order, each of which fits into one attribute."""
    if parts:
        yield from fitting_alike(len(parts), max(map(len, parts)))


def fitting_alike(count: int, size: int) -> Iterator[slice]:
    """Yield the slices of *count* encoded parts of at most *size* bytes each, as `fitting` does."""
    step = max(1, _LONGEST // size)
    return (slice(start, start + step) for start in range(0, count, step))


def messages(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield kind, flags, sequence number, and start and end of the payload of every message in *data*.

    Raises Malformed.
    """
    start, length = 0, len(data)
    while start < length:
        if start + 16 > length:
            raise Malformed(f"a header of {length - start} bytes")
        size, kind, flags, sequence, _ = HEADER.unpack_from(data, start)
        if size < 16 or start + size > length:
            raise Malformed(f"{length - start} bytes instead of {size}")
        yield kind, flags, sequence, start + 16, start + size
        start += (size + 3) & ~3


def sender(data: bytes) -> int:
    """Return the port of the socket whose request caused the first message in *data*; 0: the kernel.

    A datagram of notifications holds messages caused by one sender only.
    """
    return int(HEADER.unpack_from(data, 0)[4]) if len(data) >= HEADER.size else 0


def attribute_spans(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield kind without flags, and start and end of the value of each attribute in ``data[start:end]``.

    Raises Malformed.
    """
    unpack = _ATTRIBUTE.unpack_from
    end = _checked_end(data, end)
    while start + 4 <= end:
        size, kind = unpack(data, start)
        if size < 4 or start + size > end:
            raise _cut(size, kind, end - start)
        yield kind & 0x3FFF, start + 4, start + size  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
        start += (size + 3) & ~3


def attributes(data: bytes, start: int = 0, end: int | None = None) -> dict[int, bytes]:
    """Return the values of the attributes in ``data[start:end]``, by default all, by kind without flags.

    Raises Malformed.
    """
    # Not by `attribute_spans`, which takes a third longer: some callers read a table of connections.
    found: dict[int, bytes] = {}
    unpack = _ATTRIBUTE.unpack_from
    end = len(data) if end is None else _checked_end(data, end)
    while start + 4 <= end:
        size, kind = unpack(data, start)
        last = start + size
        if size < 4 or last > end:
            raise _cut(size, kind, end - start)
        found[kind & 0x3FFF] = data[start + 4 : last]
        start += (size + 3) & ~3
    return found


def _checked_end(data: bytes, end: int) -> int:
    if end > len(data):
        raise Malformed(f"{len(data)} bytes instead of {end}")
    return end


def _cut(size: int, kind: int, left: int) -> Malformed:
    return Malformed(f"attribute {kind & 0x3FFF} of {size} bytes, where {left} are left")


def text(value: bytes) -> str:
    """Decode the value of an attribute that holds a NUL-terminated string."""
    return value.rstrip(b"\0").decode(errors="replace")


def error_code(data: bytes, start: int) -> int:
    """Return the error number in the payload of an NLMSG_ERROR or NLMSG_DONE; 0 means success.

    Raises Malformed.
    """
    with decoding("an acknowledgement"):
        code: int = _CODE.unpack_from(data, start)[0]
        if not -(1 << 31) < code <= 0:
            raise ValueError(code)
    return -code


def payload(family: Family, *attributes: bytes) -> bytes:
    return NFGENMSG.pack(family.af, 0, 0) + b"".join(attributes)
