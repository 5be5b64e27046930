"""Dumps that the kernel interrupts or refuses, which it won't do on demand."""

import errno
import socket
import struct
from collections.abc import Iterator

import pytest

from kproxy_core.host.netlink import messages as netlink

DONE = struct.pack("=i", 0)


def answer(kind: int, payload: bytes, flags: int = 0) -> bytes:
    return netlink.message(kind, flags, payload)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket, and the other end as its kernel."""
    ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, kernel:
        yield ours, kernel


def read(sock: socket.socket) -> list[bytes]:
    return [data[start:end] for data, start, end in netlink.dump(sock, b"request")]


def test_a_dump_in_several_parts(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, kernel = ends
    kernel.send(answer(16, b"one ") + answer(16, b"two "))
    kernel.send(answer(16, b"three   "))
    kernel.send(answer(netlink.NLMSG_DONE, DONE))
    assert read(ours) == [b"one ", b"two ", b"three   "]
    assert kernel.recv(64) == b"request"


def test_an_interrupted_dump_is_read_again(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, kernel = ends
    kernel.send(answer(16, b"old ", netlink.NLM_F_DUMP_INTR) + answer(16, b"more"))
    kernel.send(answer(netlink.NLMSG_DONE, DONE))
    kernel.send(answer(16, b"new ") + answer(netlink.NLMSG_DONE, DONE))
    assert netlink.uninterrupted(lambda: read(ours)) == [b"new "]


def test_a_dump_that_is_always_interrupted_fails(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, kernel = ends
    for _ in range(6):
        kernel.send(answer(netlink.NLMSG_DONE, DONE, netlink.NLM_F_DUMP_INTR))
    with pytest.raises(InterruptedError):
        netlink.uninterrupted(lambda: read(ours))
    with pytest.raises(InterruptedError):
        read(ours)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(64)


@pytest.mark.parametrize("kind", [netlink.NLMSG_DONE, netlink.NLMSG_ERROR])
def test_a_refused_dump_fails_with_the_kernels_reason(
    ends: tuple[socket.socket, socket.socket], kind: int
) -> None:
    ours, kernel = ends
    kernel.send(answer(16, b"one ") + answer(kind, struct.pack("=i", -errno.EPERM)))
    with pytest.raises(PermissionError, match="Operation not permitted"):
        read(ours)


def test_attributes_are_read_as_they_are_written() -> None:
    inner = netlink.nested(2, netlink.attribute(3, b""))
    data = netlink.attribute(1, b"abc") + inner + netlink.attribute(4, b"wxyz")
    found = netlink.attributes(data, 0, len(data))
    assert list(found) == [1, 2, 4]
    assert (found[1], found[4]) == (b"abc", b"wxyz")
    assert netlink.attributes(found[2], 0, len(found[2])) == {3: b""}


@pytest.mark.parametrize("size", range(24))
def test_mangled_input_ends(size: int) -> None:
    """Sizes of 0 don't keep a reader where it is."""
    assert len(list(netlink.messages(bytes(size)))) == size // 16
    assert netlink.attributes(bytes(size), 0, size) == ({0: b""} if size >= 4 else {})
