"""Netlink sockets and watches, with a socket pair as the kernel where the real one does nothing on demand."""

import errno
import queue
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

import pytest

from kproxy_conformance.checks.privileges import without_privileges
from kproxy_core.netlink import messages as netlink
from kproxy_core.netlink.messages import NETLINK_NETFILTER, NETLINK_ROUTE, Malformed, NetlinkRequest, Span
from kproxy_core.netlink.sockets import NetlinkSocket, NotificationThread, PollThread, RequestError, failures

NOTHING = 0xEE << 8
"""A subsystem of nfnetlink that no kernel has."""

SUCCESS = struct.pack("=i", 0)


class Kernel:
    """The other end of a socket pair. Answers the requests of one socket by number, from 1."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client = NetlinkSocket(ours)

    def answer(self, *parts: tuple[int, bytes, int], number: int = 1) -> None:
        """Send one datagram of messages, each given as kind, payload and flags."""
        self.end.send(b"".join(netlink.message(kind, flags, data, number) for kind, data, flags in parts))

    def dump(self) -> list[bytes]:
        return self.client.dump(7, b"", texts)


def texts(answers: Iterator[Span]) -> list[bytes]:
    return [data[start:end] for data, start, end in answers]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    with made.end, made.client:
        yield made


def test_a_dump_in_several_parts(kernel: Kernel) -> None:
    kernel.answer((16, b"one ", 0), (16, b"two ", 0))
    kernel.answer((16, b"three   ", 0))
    kernel.answer((netlink.NLMSG_DONE, SUCCESS, 0))
    assert kernel.dump() == [b"one ", b"two ", b"three   "]
    assert kernel.end.recv(64) == netlink.message(7, netlink.NLM_F_DUMP, b"", 1)


def test_an_interrupted_dump_is_read_again(kernel: Kernel) -> None:
    kernel.answer((16, b"old ", netlink.NLM_F_DUMP_INTR), (16, b"more", 0))
    kernel.answer((netlink.NLMSG_DONE, SUCCESS, 0))
    kernel.answer((16, b"new ", 0), (netlink.NLMSG_DONE, SUCCESS, 0), number=2)
    assert kernel.dump() == [b"new "]


def test_a_dump_that_is_always_interrupted_fails_after_five_attempts(kernel: Kernel) -> None:
    for number in range(1, 7):
        kernel.answer((netlink.NLMSG_DONE, SUCCESS, netlink.NLM_F_DUMP_INTR), number=number)
    with pytest.raises(InterruptedError):
        kernel.dump()
    assert kernel.client.receive() != b""
    assert kernel.client.receive() == b""


def test_answers_to_an_earlier_request_are_skipped(kernel: Kernel) -> None:
    kernel.answer((16, b"one ", 0), (netlink.NLMSG_DONE, SUCCESS, 0))
    kernel.answer((16, b"late", 0))
    kernel.answer((16, b"two ", 0), (netlink.NLMSG_DONE, SUCCESS, 0), number=2)
    assert (kernel.dump(), kernel.dump()) == ([b"one "], [b"two "])


@pytest.mark.parametrize("kind", [netlink.NLMSG_DONE, netlink.NLMSG_ERROR])
def test_a_refused_dump_fails_with_the_kernels_reason(kernel: Kernel, kind: int) -> None:
    kernel.answer((16, b"one ", 0), (kind, struct.pack("=i", -errno.EPERM), 0))
    with pytest.raises(PermissionError, match="Operation not permitted"):
        kernel.dump()


def test_a_request_returns_its_answers() -> None:
    get_link, loopback = 18, struct.pack("=BxHiII", 0, 0, 1, 0, 0)
    with NetlinkSocket.open(NETLINK_ROUTE) as sock:
        ((data, start, end),) = sock.request(get_link, 0, loopback)
    assert netlink.text(netlink.attributes(data, start + len(loopback), end)[3]) == "lo"


def test_a_refused_request_fails_with_the_kernels_reason() -> None:
    with NetlinkSocket.open(NETLINK_ROUTE) as sock, pytest.raises(OSError, match="No such device"):
        sock.request(18, 0, struct.pack("=BxHiII", 0, 0, 0x7FFFFFFF, 0, 0))


def test_another_process_cannot_send_to_a_socket() -> None:
    with NetlinkSocket.open(NETLINK_ROUTE) as sock, socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as other:
        with pytest.raises(ConnectionRefusedError):
            other.sendto(netlink.message(3, 0, b"", 1), (sock.port, 0))
        assert sock.receive() == b""


def test_every_refused_request_is_returned() -> None:
    with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        refused = sock.exchange([NetlinkRequest(NOTHING, 0, bytes(4))] * 3)
    assert [at for at, _ in refused] == [0, 1, 2]


def test_without_privileges_no_missing_answer_is_awaited() -> None:
    with NetlinkSocket.open(NETLINK_NETFILTER) as sock, without_privileges():
        with pytest.raises(PermissionError):
            sock.exchange([NetlinkRequest(NOTHING, 0, bytes(4))] * 3)
        assert sock.exchange([NetlinkRequest(NOTHING, 0, bytes(4))]) == [RequestError(0, errno.EPERM)]


def test_more_requests_than_one_batch_holds() -> None:
    unknown = NetlinkRequest(0xFF, 0, bytes(16))
    with NetlinkSocket.open(NETLINK_ROUTE) as sock:
        assert [at for at, _ in sock.exchange([unknown] * 450)] == [*range(450)]
        assert sock.exchange([]) == []


def test_attributes_are_decoded_as_they_were_encoded() -> None:
    inner = netlink.nested(2, netlink.attribute(3, b""))
    data = netlink.attribute(1, b"abc") + inner + netlink.text_attribute(4, "wxyz")
    found = netlink.attributes(data, 0, len(data))
    assert list(found) == [1, 2, 4]
    assert (found[1], netlink.text(found[4])) == (b"abc", "wxyz")
    assert netlink.attributes(found[2], 0, len(found[2])) == {3: b""}


@pytest.mark.parametrize("data", [
    bytes(15), bytes(16), bytes(23), netlink.message(1, 0, b"1234")[:-1], netlink.message(1, 0, b"") + b"\1",
])
def test_cut_messages_are_refused(data: bytes) -> None:
    """A size of 0 does not make a reader loop."""
    with pytest.raises(Malformed, match="not understood"):
        list(netlink.messages(data))


@pytest.mark.parametrize("data", [bytes(4), b"\5\0\1\0", b"\3\0\1\0", netlink.attribute(1, b"12345")[:8]])
def test_cut_attributes_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed, match="attribute"):
        netlink.attributes(data)


@pytest.mark.parametrize("code", [1, -(1 << 31)])
def test_errors_that_no_kernel_has_are_refused(code: int) -> None:
    with pytest.raises(Malformed):
        netlink.error_code(struct.pack("=i", code), 0)


def test_a_dump_without_an_end_fails(kernel: Kernel) -> None:
    kernel.answer((16, b"one ", 0))
    with pytest.raises(Malformed, match="without an end"):
        kernel.dump()


def test_after_a_dump_that_is_not_understood_another_one_is_possible(kernel: Kernel) -> None:
    kernel.answer((16, b"one ", 0))
    kernel.end.send(b"odd")
    kernel.answer((netlink.NLMSG_DONE, SUCCESS, 0))
    with pytest.raises(Malformed):
        kernel.dump()
    kernel.answer((16, b"two ", 0), (netlink.NLMSG_DONE, SUCCESS, 0), number=2)
    assert kernel.dump() == [b"two "]


class Notified:
    """A watch on a socket pair, and its calls."""

    def __init__(self, kernel: Kernel) -> None:
        self.calls: queue.Queue[tuple[list[bytes], bool]] = queue.Queue()
        self.again: float | None = None
        self.watch = NotificationThread("test-watch", kernel.client, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> float | None:
        self.calls.put(([*datagrams], lost))
        return self.again


@pytest.fixture
def notified(kernel: Kernel) -> Iterator[Notified]:
    made = Notified(kernel)
    yield made
    made.watch.close()


def test_a_watch_delivers_notifications(kernel: Kernel, notified: Notified) -> None:
    for data in (b"one", b"two"):
        kernel.end.send(data)
        assert notified.calls.get(timeout=120) == ([data], False)
    assert notified.calls.empty()


def test_a_watch_calls_again_without_notifications_if_asked_to(kernel: Kernel, notified: Notified) -> None:
    notified.again = 0.01
    kernel.end.send(b"one")
    assert notified.calls.get(timeout=120) == ([b"one"], False)
    assert notified.calls.get(timeout=120) == ([], False)


def test_a_watch_takes_what_it_cannot_decode_for_lost(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    calls: queue.Queue[tuple[list[bytes], bool]] = queue.Queue()

    def receive(datagrams: Sequence[bytes], lost: bool) -> None:
        calls.put(([*datagrams], lost))
        for data in datagrams:
            list(netlink.messages(data))

    before = failures["test-odd"]
    watch = NotificationThread("test-odd", kernel.client, receive)
    for data in (b"odd", b"odder"):
        kernel.end.send(data)
        assert calls.get(timeout=120) == ([data], False)
        assert calls.get(timeout=120) == ([], True)
    watch.close()
    assert failures["test-odd"] == before + 2
    assert [record.message for record in caplog.records] == ["notifications not processed"]


def test_a_thread_survives_its_callback(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_core.netlink.sockets._REST_SECONDS", 0.01)
    calls: queue.Queue[bytes] = queue.Queue()

    def ready() -> None:
        calls.put(data := kernel.client.receive())
        if data == b"bad":
            raise ZeroDivisionError

    thread = PollThread("test-callback", kernel.client.fileno(), ready)
    for data in (b"bad", b"good"):
        kernel.end.send(data)
        while calls.get(timeout=120) != data:  # After a failure, it is called without an event, too.
            pass
    thread.close()
    assert failures["test-callback"] == 1


class Overrun(NetlinkSocket):
    """A socket whose buffer overflowed once, before what it still holds could be read."""

    overflows = 1

    def receive(self) -> bytes:
        if self.overflows:
            self.overflows -= 1
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return super().receive()


def test_a_watch_reports_lost_notifications() -> None:
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.send(b"old")
    calls: queue.Queue[tuple[list[bytes], bool]] = queue.Queue()
    watch = NotificationThread(
        "test-watch", Overrun(ours), lambda datagrams, lost: calls.put(([*datagrams], lost)))
    try:
        assert calls.get(timeout=120) == ([b"old"], True)
        end.send(b"new")
        assert calls.get(timeout=120) == ([b"new"], False)
    finally:
        watch.close()
        end.close()


def test_a_closed_watch_leaves_no_thread_and_is_silent(kernel: Kernel, notified: Notified) -> None:
    notified.watch.close()
    notified.watch.close()
    assert notified.calls.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-watch"]
