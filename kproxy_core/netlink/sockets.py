"""Netlink sockets: requests, batches, dumps and notifications (linux/netlink.h)."""

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from kproxy_core.netlink import messages as netlink
from kproxy_core.netlink.messages import NETLINK_NETFILTER, Malformed
from kproxy_core.netlink.socket_filter import ACCEPT, DROP, Instruction, assemble, attach, if_equal, load

T = TypeVar("T")

log = logging.getLogger("kproxy.host")

_SOL_NETLINK: Final = 270
_NETLINK_ADD_MEMBERSHIP: Final = 1
_NETLINK_CAP_ACK: Final = 10
_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33

_PORT: Final = 12
"""Offset in a message of the port that sent or caused it."""
_RECEIVE_SIZE: Final = 1 << 17
"""Size in bytes of one read, above the 32 KiB that the kernel puts into one part of a dump."""
_DUMP_ATTEMPTS: Final = 5
"""As in kube-proxy."""
_MOST_AT_ONCE: Final = 256
"""Limit for the datagrams of one `NetlinkSocket.pending`."""
_BATCH_REQUESTS: Final = 200
_BATCH_BYTES: Final = 1 << 16
"""A batch within these limits fits into a default send buffer, and its errors into a receive buffer."""
_ANNOUNCEMENT_SPACE: Final = 8 << 20
"""Size in bytes of the receive buffer of `Announcements`."""


_REST_SECONDS: Final = 1.0
"""Pause of a thread after a failure, so that one that repeats does not keep a CPU busy."""

failures: Final = Counter[str]()
"""Failures of threads that read notifications, by the thread's name. They continue after each."""


def _count_failure(thread: str, error: Exception) -> None:
    """Count a failure, and log the first one of a thread."""
    failures[thread] += 1
    if failures[thread] == 1:
        log.error("notifications not processed", exc_info=error, extra={"fields": {
            "thread": thread, "error": str(error) or repr(error)}})


class PollThread:
    """Calls back whenever a descriptor is readable, from a thread of its own.

    If the callback raises an exception, this is logged and counted in `failures`, and the thread continues
    after a second.
    """

    def __init__(
        self, name: str, descriptor: int, ready: Callable[[], float | None], *, first: float | None = None,
    ) -> None:
        """Start watching. *ready* returns None, or the seconds after which to call it even without events.

        *name* is the thread's, *first* the seconds before the first call without events.
        """
        self._ready = ready
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._poll.register(self._stop, select.POLLIN)
        self._thread = threading.Thread(target=self._run, args=(first,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the callback is not called after this returns. The callback must not call this."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1

    def _run(self, seconds: float | None) -> None:
        while True:
            events = self._poll.poll(None if seconds is None else seconds * 1000)
            if any(descriptor == self._stop for descriptor, _ in events):
                return
            try:
                seconds = self._ready()
            except StopIteration:  # The callback is a generator that has failed before.
                return
            except Exception as error:  # noqa: BLE001 - any would end the thread, and with it all notices
                _count_failure(self._thread.name, error)
                seconds = _REST_SECONDS
                if select.select([self._stop], [], [], _REST_SECONDS)[0]:
                    return


class RequestError(NamedTuple):
    """The kernel's error for one request."""

    number: int
    """Index of the request, or its sequence number (see `NetlinkSocket.transact`)."""
    code: int
    """Error number; those of ipset lie beyond errno.h."""

    @property
    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))


class RawSocket(Protocol):
    """The methods of a `socket.socket` by which messages are sent and received."""

    def send(self, data: bytes, /) -> int: ...

    def recv(self, size: int, flags: int, /) -> bytes: ...

    def fileno(self) -> int: ...

    def getsockname(self) -> tuple[int, int]: ...

    def getsockopt(self, level: int, option: int, /) -> int: ...

    def close(self) -> None: ...


class Kernel(Protocol):
    """The other end of netlink sockets: Linux, or one in memory such as `kproxy_core.nft.fake.FakeKernel`."""

    def open_socket(
        self, protocol: int, *, groups: Collection[int], accept: Sequence[Instruction], receive_space: int,
        send_space: int,
    ) -> RawSocket:  # fmt: skip
        """Open a socket; see `NetlinkSocket.open`. Raises OSError."""

    def namespace(self) -> Hashable:
        """Identify the network namespace of the calling thread. Raises OSError."""


class Linux:
    """The kernel that runs this process."""

    def open_socket(
        self, protocol: int, *, groups: Collection[int], accept: Sequence[Instruction], receive_space: int,
        send_space: int,
    ) -> RawSocket:  # fmt: skip
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.bind((0, 0))
            # To the kernel: it then refuses messages that other processes send to this socket (net/netlink).
            sock.connect((0, 0))
            # Errors then carry the header of the request only, not all of it.
            sock.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            _set_buffer(sock, _SO_RCVBUFFORCE, socket.SO_RCVBUF, receive_space)
            _set_buffer(sock, _SO_SNDBUFFORCE, socket.SO_SNDBUF, send_space)
            if accept:
                attach(sock, accept)
            for group in groups:
                sock.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, group)
        except OSError:
            sock.close()
            raise
        return sock

    def namespace(self) -> Hashable:
        return os.stat("/proc/thread-self/ns/net").st_ino


_kernels: Final[list[Kernel]] = [Linux()]


def kernel() -> Kernel:
    """Return the kernel in which `NetlinkSocket.open` opens sockets."""
    return _kernels[-1]


@contextmanager
def opening_in(other: Kernel) -> Iterator[None]:
    """Have `NetlinkSocket.open` open the sockets of all threads in *other*. Open sockets are kept."""
    _kernels.append(other)
    try:
        yield
    finally:
        _kernels.remove(other)


class NetlinkSocket:
    """A netlink socket in the network namespace of the thread that opened it. Not thread-safe.

    The kernel answers netfilter, rtnetlink and generic netlink requests before `send` returns. An answer that
    cannot be received at once will therefore never arrive, and nothing here waits for one.
    """

    def __init__(self, sock: RawSocket) -> None:
        self._socket = sock
        self._sequence = 0

    @classmethod
    def open(
        cls, protocol: int, *, groups: Collection[int] = (), ignore: Collection[int] = (),
        accept: Sequence[Instruction] = (), receive_space: int = 0, send_space: int = 0,
    ) -> Self:  # fmt: skip
        """Open a socket that receives the notifications of *groups*, by number.

        Notifications caused by the ports in *ignore* are dropped by the kernel, as are those for which the
        program *accept* returns 0. *receive_space* and *send_space* are the buffers' sizes in bytes, limited
        by net.core.*mem_max without CAP_NET_ADMIN; 0 means the kernel's default. Raises OSError.
        """
        return cls(kernel().open_socket(
            protocol, groups=groups, accept=accept or _ignoring(ignore), receive_space=receive_space,
            send_space=send_space))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def port(self) -> int:
        """The port id to which the kernel bound this socket."""
        return int(self._socket.getsockname()[0])

    @property
    def send_limit(self) -> int:
        """The bytes that the kernel takes at once; it counts its own overhead against the buffer."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def request(self, kind: int, flags: int, payload: bytes) -> list[netlink.Span]:
        """Send one request and return its answers. Raises OSError if the kernel refuses it, Malformed."""
        self._sequence += 1
        self._socket.send(netlink.message(kind, flags | netlink.NLM_F_ACK, payload, self._sequence))
        found: list[netlink.Span] = []
        code = 0
        for answer, data, number, start, end in self._answers():
            if answer == netlink.NLMSG_ERROR:
                code = netlink.error_code(data, start)
            elif number == self._sequence:
                found.append((data, start, end))
        _raise_for(code)
        return found

    def request_one(self, kind: int, payload: bytes) -> netlink.Span:
        """Send one request and return its only answer. Raises OSError, Malformed without one."""
        answers = self.request(kind, 0, payload)
        if len(answers) != 1:
            raise Malformed(f"{len(answers)} answers to a request of kind {kind:#x}")
        return answers[0]

    def exchange(self, requests: Sequence[netlink.NetlinkRequest]) -> list[RequestError]:
        """Send *requests*, in batches, and return the refused ones by index. All others are done.

        Raises OSError, also if a batch is refused as a whole: without the privilege for it, the kernel
        answers its first request only.
        """
        refused: list[RequestError] = []
        start = size = 0
        for at, request in enumerate(requests):
            if at - start == _BATCH_REQUESTS or (at > start and size + len(request.payload) > _BATCH_BYTES):
                refused += self._exchange(requests, start, at)
                start, size = at, 0
            size += len(request.payload)
        return refused + self._exchange(requests, start, len(requests))

    def _exchange(
        self, requests: Sequence[netlink.NetlinkRequest], start: int, end: int
    ) -> list[RequestError]:
        if start == end:
            return []
        data = b"".join([
            netlink.message(kind, flags | (netlink.NLM_F_ACK if number == end else 0), payload, number)
            for number, (kind, flags, payload) in enumerate(requests[start:end], start + 1)
        ])  # fmt: skip
        return [RequestError(number - 1, code) for number, code in self.transact(data, end)]

    def transact(self, data: bytes, last: int) -> list[RequestError]:
        """Send encoded requests and return the refused ones by sequence number, in order.

        Only the request with sequence number *last* asks for an acknowledgement: the others are answered
        if they fail. Raises OSError if the kernel says nothing about *last*.
        """
        self._socket.send(data)
        refused: list[RequestError] = []
        answered = False
        for kind, answer, number, start, _ in self._answers():
            if kind == netlink.NLMSG_ERROR:
                answered = answered or number == last
                if code := netlink.error_code(answer, start):
                    refused.append(RequestError(number, code))
                if answered and not refused:
                    break
        if not answered:
            _raise_for(refused[0].code if refused else errno.ENOBUFS)
        return refused

    def dump(self, kind: int, payload: bytes, collect: Callable[[Iterator[netlink.Span]], T]) -> T:
        """Return the result of *collect* for the answers to a dump request; it must read all of them.

        If the data changed during the dump (NLM_F_DUMP_INTR), the dump is repeated and *collect* called
        again, five times at most. Raises OSError, Malformed, InterruptedError after the last attempt.
        """
        for _ in range(_DUMP_ATTEMPTS - 1):
            try:
                return self._collected(kind, payload, collect)
            except InterruptedError:
                continue
        return self._collected(kind, payload, collect)

    def _collected(self, kind: int, payload: bytes, collect: Callable[[Iterator[netlink.Span]], T]) -> T:
        try:
            return collect(self._dump(kind, payload))
        except Malformed:
            for _ in iter(self.receive, b""):  # The kernel begins no other dump before the end of this one.
                pass
            raise

    def _dump(self, kind: int, payload: bytes) -> Iterator[netlink.Span]:
        self._sequence += 1
        sequence, interrupted = self._sequence, False
        self._socket.send(netlink.message(kind, netlink.NLM_F_DUMP, payload, sequence))
        while True:
            data = self.receive()
            if not data:
                raise Malformed("an answer without an end")
            for answer, flags, number, start, end in netlink.messages(data):
                if number != sequence:
                    continue
                interrupted = interrupted or bool(flags & netlink.NLM_F_DUMP_INTR)
                if answer not in (netlink.NLMSG_ERROR, netlink.NLMSG_DONE):
                    yield data, start, end
                    continue
                _raise_for(netlink.error_code(data, start))
                if interrupted:
                    raise InterruptedError(errno.EINTR, "changed while it was read")
                return

    def _answers(self) -> Iterator[tuple[int, bytes, int, int, int]]:
        """Yield kind, data, sequence number, and start and end of the payload of every message received."""
        for data in iter(self.receive, b""):
            for kind, _, number, start, end in netlink.messages(data):
                yield kind, data, number, start, end

    def pending(self) -> tuple[list[bytes], bool]:
        """Return datagrams that have arrived, oldest first, and True if the kernel dropped some.

        All if some were dropped, because those are outdated; else `_MOST_AT_ONCE` at most. Raises OSError.
        """
        found: list[bytes] = []
        lost = False
        while lost or len(found) < _MOST_AT_ONCE:
            try:
                data = self.receive()
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True  # Datagrams that are still in the socket are older than the dropped ones.
                continue
            if not data:
                break
            found.append(data)
        return found, lost

    def receive(self) -> bytes:
        """Return the next datagram that has arrived; b"" if none has. Raises OSError."""
        try:
            return self._socket.recv(_RECEIVE_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


def _set_buffer(sock: socket.socket, force: int, option: int, size: int) -> None:
    if not size:
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, force, size)
    except PermissionError:  # In an unprivileged user namespace.
        sock.setsockopt(socket.SOL_SOCKET, option, size)


def _ignoring(ports: Collection[int]) -> Sequence[Instruction]:
    """Return a filter that drops datagrams whose first message was caused by one of *ports*."""
    values = [int.from_bytes(struct.pack("=I", port), "big") for port in ports]
    if not values:
        return ()
    return assemble(load(4, _PORT), *(if_equal(value, "drop") for value in values), ACCEPT, "drop", DROP)


def _raise_for(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


class Announcements(Generic[T]):
    """Announcements of netfilter in this thread's network namespace, for a caller that polls `fileno`."""

    def __init__(self, groups: Sequence[int], parse: Callable[[bytes], Iterator[T]]) -> None:
        """*parse* yields the announcements in a datagram. Raises OSError, as without CAP_NET_ADMIN."""
        self._parse = parse
        self._socket = NetlinkSocket.open(
            NETLINK_NETFILTER, groups=groups, receive_space=_ANNOUNCEMENT_SPACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Iterator[T]:
        """Yield the announcements that have arrived. Some may be lost on a busy node."""
        while datagrams := self._socket.pending()[0]:
            for data in datagrams:
                try:
                    yield from self._parse(data)
                except Malformed as error:
                    _count_failure(threading.current_thread().name, error)


Receive = Callable[[Sequence[bytes], bool], float | None]
"""Takes datagrams, oldest first, and True if the kernel dropped some because the socket's buffer was full.

Returns None, or the seconds after which to call it again even without notifications.
"""


class NotificationThread(PollThread):
    """Hands the notifications of a netlink socket to a callback, from a thread of its own.

    Notifications that the callback cannot decode count as dropped ones.
    """

    def __init__(self, name: str, sock: NetlinkSocket, receive: Receive) -> None:
        """Start watching. *name* is the thread's; *sock* is closed with the watch."""
        self._socket = sock

        def deliver() -> float | None:
            try:
                return receive(*sock.pending())
            except Malformed as error:
                _count_failure(name, error)
                return receive((), True)

        super().__init__(name, sock.fileno(), deliver)

    def close(self) -> None:
        super().close()
        self._socket.close()
