"""Netlink as far as the node needs it: messages, attributes and dumps (linux/netlink.h).

A few hundred bytes of `struct` instead of a library that takes longer to import than kproxy to start.
Sockets belong to the network namespace of the thread that opens them.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

NETLINK_ROUTE: Final = 0
NETLINK_NETFILTER: Final = 12

NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_DUMP_INTR: Final = 0x10
NLM_F_DUMP: Final = 0x300

NLA_F_NESTED: Final = 0x8000
_NLA_TYPE_MASK: Final = 0x3FFF

RECEIVE_SIZE: Final = 1 << 16
"""Bytes to receive at once: more than the 32 KiB that the kernel puts into one part of a dump."""

_ATTEMPTS: Final = 5

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_CODE = struct.Struct("=i")


def open_socket(protocol: int, groups: int = 0) -> socket.socket:
    """A netlink socket that gets the notifications of *groups* (a mask). Raises OSError."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        sock.bind((0, groups))
    except OSError:
        sock.close()
        raise
    return sock


def message(kind: int, flags: int, payload: bytes, sequence: int = 0) -> bytes:
    """One request. *payload* is already padded to four bytes, as headers and attributes are."""
    header = _HEADER.pack(_HEADER.size + len(payload), kind, flags | NLM_F_REQUEST, sequence, 0)
    return header + payload


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    """One attribute that holds *attributes*."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def attributes(data: bytes, start: int, end: int) -> dict[int, bytes]:
    """The values of the attributes in ``data[start:end]`` by kind, without flags."""
    found = {}
    while end - start >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        found[kind & _NLA_TYPE_MASK] = data[start + _ATTRIBUTE.size : start + size]
        start += max(_aligned(size), _ATTRIBUTE.size)
    return found


def messages(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Kind, flags, sequence, and start and end of the payload of every message in *data*."""
    start = 0
    while len(data) - start >= _HEADER.size:
        size, kind, flags, sequence, _ = _HEADER.unpack_from(data, start)
        yield kind, flags, sequence, start + _HEADER.size, start + size
        start += max(_aligned(size), _HEADER.size)


def dump(sock: socket.socket, request: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Send a dump *request* and yield the answers: each is the payload ``data[start:end]``.

    Raises OSError as the kernel reports it. What changed meanwhile may be missing or be
    there twice; when the kernel noticed, the end of the dump is an InterruptedError.
    """
    sock.send(request)
    interrupted = False
    while True:
        data = sock.recv(RECEIVE_SIZE)
        for kind, flags, _, start, end in messages(data):
            interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
            if kind not in (NLMSG_ERROR, NLMSG_DONE):
                yield data, start, end
                continue
            raise_for(error_code(data, start))
            if interrupted:
                raise InterruptedError(errno.EINTR, "changed while it was read")
            return


def uninterrupted(read: Callable[[], T]) -> T:
    """The result of *read*, which reads a dump to its end, without an interruption.

    Tries five times, as kube-proxy does, before it passes on InterruptedError.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(InterruptedError):
            return read()
    return read()


def error_code(data: bytes, start: int) -> int:
    """The error number in the payload of an NLMSG_ERROR or NLMSG_DONE; 0: all is well."""
    code: int = _CODE.unpack_from(data, start)[0]
    return -code


def raise_for(code: int) -> None:
    """Raise the OSError for the error number *code*, if it is not 0."""
    if code:
        raise OSError(code, os.strerror(code))


def _aligned(size: int) -> int:
    return (size + 3) & ~3
