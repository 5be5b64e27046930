"""All HTTP listeners of the process, on one thread."""

import errno
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct, field

from kproxy_core.model.address import Address, family_of, format_address, format_socket
from kproxy_core.observe.messages import Answer, Handler, HttpError, Request, Slow, Turn

if TYPE_CHECKING:
    from kproxy_core.observe.exchange import Exchange

log = logging.getLogger("kproxy.http")

_Client = TypeVar("_Client", bound=Hashable)


# The queue of slow answers. No I/O, no threads.

_MOST_WAITING = 16
"""Limit for queued answers."""
_REST_SHARE = 4
"""Rest after an answer, as a multiple of its duration: answers cost at most a fifth of one CPU."""
_LONGEST_PAUSE = 10.0
"""Upper bound of the rest in seconds."""


class Job(Struct, Generic[_Client], eq=False):
    """One slow answer, and the clients that wait for it."""

    request: Request
    slow: Slow
    clients: dict[_Client, None] = field(default_factory=dict)
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Set once no client waits."""


class SlowAnswers(Generic[_Client]):
    """Schedules one answer at a time, each for all clients with the same request. For one thread.

    The answer of a client that disconnected is not made. Answers of `Turn.FIRST` rest for the cost of their
    own kind only, so that requests for pages do not delay a scrape.
    """

    def __init__(self) -> None:
        self._waiting: list[Job[_Client]] = []
        self._of: dict[_Client, Job[_Client]] = {}
        """The job of each client."""
        self._making: Job[_Client] | None = None
        """The answer in progress, except those of `Turn.AT_ONCE`."""
        self._first_at = self._next_at = 0.0
        """Earliest times of the next answer of `Turn.FIRST`, and of any other."""

    def add(self, request: Request, slow: Slow, client: _Client) -> bool:
        """Queue the answer for *client*. Return False if too many are queued."""
        job = next((job for job in self._waiting
                    if slow.same is not None and job.slow.same == slow.same), None)  # fmt: skip
        if job is None:
            if len(self._waiting) >= _MOST_WAITING and slow.turn is Turn.IN_ORDER:
                return False
            job = Job[_Client](request, slow)
            self._waiting.append(job)
        job.clients[client] = None
        self._of[client] = job
        return True

    def leave(self, client: _Client) -> None:
        """Remove *client*, which no longer waits."""
        job = self._of.pop(client, None)
        if job is None:
            return
        del job.clients[client]
        if not job.clients:
            job.abandoned.set()
            if job in self._waiting:
                self._waiting.remove(job)

    def take(self, now: float) -> Job[_Client] | None:
        """Return the next answer if it may start now."""
        job = self._next(now)
        if job is not None:
            self._waiting.remove(job)
            if job.slow.turn is not Turn.AT_ONCE:
                self._making = job
        return job

    def made(self, job: Job[_Client], cost: float, now: float) -> list[_Client]:
        """Record that *job* is done and took *cost* seconds. Return the clients that still wait."""
        if self._making is job:
            self._making = None
        rest = min(_REST_SHARE * cost, _LONGEST_PAUSE)
        self._next_at = max(self._next_at, now) + rest
        if job.slow.turn is Turn.FIRST:
            self._first_at = now + rest
        clients = list(job.clients)
        for client in clients:
            self.leave(client)
        return clients

    def next_at(self) -> float | None:
        """Return the time at which `take` returns an answer without a further change; None: never."""
        times = [self._start(job) for job in self._waiting]
        return min((at for at in times if at is not None), default=None)

    def _next(self, now: float) -> Job[_Client] | None:
        ready = [job for job in self._waiting if (at := self._start(job)) is not None and at <= now]
        return min(ready, key=lambda job: job.slow.turn.value, default=None)

    def _start(self, job: Job[_Client]) -> float | None:
        """Return the earliest start of *job*; None: when another is done."""
        if job.slow.turn is Turn.AT_ONCE:
            return 0.0
        if self._making is not None:
            return None
        return self._first_at if job.slow.turn is Turn.FIRST else self._next_at


# The server.

_MOST_CONNECTIONS = 256
_PAUSE = 0.05
"""Delay in seconds before a connection with an incomplete request is read again: a client that sends single
bytes costs at most 20 reads a second."""
_RECEIVE = 4096
"""Size in bytes of one read. Bytes that a client sends one by one cost the kernel 0.3 us each."""
_BURST = 0.002
"""CPU time in seconds after which the thread rests."""
_LONGEST_REST = 0.25
"""Upper bound of the rest in seconds."""
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BUSY = Answer(503, b"too many clients wait for slow answers\n", headers=(("Retry-After", "1"),))
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

Binding = tuple[Address, int]
"""An address and TCP port to listen on."""


class Listener(Struct, eq=False):
    """Sockets that share a handler. Made by `HttpServer.listen`, whose thread owns all but `close`."""

    server: "HttpServer"
    name: str
    bindings: Sequence[Binding]
    handler: Handler
    both_families: bool
    failed: Callable[[OSError], None] | None
    problem: str = ""
    sockets: Sequence[socket.socket] = ()

    def close(self) -> None:
        """Stop listening, before any later call to the server takes effect."""
        self.server._do(lambda: self.server._unbind(self))

    def open(self) -> bool:
        """Listen on all bindings. Return False if one failed: the others are closed."""
        sockets: list[socket.socket] = []
        try:
            for address, port in self.bindings:
                sockets.append(_listen(address, port, self.both_families))
        except OSError as error:
            for opened in sockets:
                opened.close()
            self._report(error)
            return False
        if self.problem:
            log.info("listening again", extra={"fields": {"listener": self.name}})
            self.problem = ""
        self.sockets = sockets
        return True

    @property
    def addresses(self) -> str:
        return ",".join(format_socket(*binding) for binding in self.bindings)

    def _report(self, error: OSError) -> None:
        if self.problem == str(error):
            return
        self.problem = str(error)
        log.error("cannot listen", extra={
            "fields": {"listener": self.name, "addresses": self.addresses, "error": str(error)}})
        if self.failed is not None:
            self.failed(error)


class _Connection(Struct, eq=False):
    """A connection with one client, for one request."""

    client: socket.socket
    handler: Handler
    deadline: float
    exchange: "Exchange"
    answering: bool = False
    """A slow answer is being made."""
    unsent: bytes | memoryview = b""


class HttpServer:
    """Serves any number of listeners. Any thread may call.

    One request per connection, without TLS. A slow client holds a file descriptor until its deadline and
    delays no other client. All clients together get at most a fifth of one CPU, so that they do not delay
    syncs; so do slow answers, which are made one at a time on another thread. Without clients, the thread
    sleeps.
    """

    def __init__(self, *, retry_seconds: float = 5.0, connection_seconds: float = 15.0) -> None:
        """*retry_seconds*: interval between attempts to bind (as in kube-proxy, 5).

        *connection_seconds*: timeout for a client to send its request and receive the answer.
        """
        self._retry_seconds = retry_seconds
        self._connection_seconds = connection_seconds
        self._selector = selectors.DefaultSelector()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        self._todo: deque[Callable[[], None]] = deque()
        self._unbound: dict[Listener, float] = {}
        """Time of the next attempt."""
        self._connections: dict[_Connection, None] = {}
        """Oldest first."""
        self._slow: SlowAnswers[_Connection] = SlowAnswers()
        self._paused: dict[_Connection, float] = {}
        """Time of the next read, in ascending order."""
        self._running = True
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close everything, and return when the thread has ended."""
        self._do(self._finish)
        if self._thread.is_alive():
            self._thread.join()

    def listen(
        self, name: str, bindings: Sequence[Binding], handler: Handler, *, both_families: bool = False,
        failed: Callable[[OSError], None] | None = None,
    ) -> Listener:
        """Serve *handler* on all *bindings*, or on none if one fails, which is retried. Returns at once.

        *both_families*: an unspecified address of either family listens on both (as Go's "tcp").
        *failed* is called on the server's thread for each new problem, which is also logged.
        *name* is for the log.
        """
        listener = Listener(self, name, bindings, handler, both_families, failed)
        self._do(lambda: self._bind(listener))
        return listener

    def problems(self) -> Iterator[str]:
        """Yield why listeners do not listen, one sentence each."""
        for each in list(self._unbound):
            yield f"{each.name}: cannot listen on {each.addresses}: {each.problem}"

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        os.eventfd_write(self._alarm, 1)

    # On the server's thread

    def _run(self) -> None:
        used = 0.0
        while self._running:
            ready = self._selector.select(self._patience())
            started = time.thread_time()
            for key, _ in ready:
                if isinstance(key.data, _Connection):
                    self._serve(self._send if key.data.unsent else self._receive, key.data)
                elif isinstance(key.data, Listener):
                    self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
                else:
                    os.eventfd_read(self._alarm)
            while self._todo and self._running:
                self._todo.popleft()()
            now = time.monotonic()
            for connection in [c for c, at in self._paused.items() if at <= now]:
                del self._paused[connection]
                self._selector.register(connection.client, selectors.EVENT_READ, connection)
            for listener in [listener for listener, at in self._unbound.items() if at <= now]:
                self._bind(listener)
            for connection in [c for c in self._connections if c.deadline <= now]:
                self._drop(connection)
            while (job := self._slow.take(now)) is not None:
                self._start_slowly(job)
            used += time.thread_time() - started
            if used > _BURST and self._running:
                time.sleep(min(_REST_SHARE * used, _LONGEST_REST))
                used = 0.0

    def _patience(self) -> float | None:
        """Return the seconds until a bind, a read, a slow answer or a deadline is due; None: none is."""
        times = [*self._unbound.values(), *(connection.deadline for connection in self._connections)]
        if (at := self._slow.next_at()) is not None:
            times.append(at)
        times += itertools.islice(self._paused.values(), 1)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _finish(self) -> None:
        self._running = False
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Listener):
                self._unbind(key.data)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()

    def _bind(self, listener: Listener) -> None:
        self._unbound.pop(listener, None)
        if not listener.open():
            self._unbound[listener] = time.monotonic() + self._retry_seconds
        for opened in listener.sockets:
            self._selector.register(opened, selectors.EVENT_READ, listener)

    def _unbind(self, listener: Listener) -> None:
        self._unbound.pop(listener, None)
        for opened in listener.sockets:
            self._selector.unregister(opened)
            opened.close()
        listener.sockets = ()

    def _accept(self, listening: socket.socket, listener: Listener) -> None:
        try:
            connected, _ = listening.accept()
            from kproxy_core.observe.exchange import Exchange  # for the first client, if it can be read
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                if self._connections:
                    self._drop(next(iter(self._connections)))
                else:
                    time.sleep(0.1)  # no connection to close in exchange
            return
        connected.setblocking(False)
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._drop(next(iter(self._connections)))
        deadline = time.monotonic() + self._connection_seconds
        connection = _Connection(connected, listener.handler, deadline, Exchange())
        self._connections[connection] = None
        self._selector.register(connected, selectors.EVENT_READ, connection)

    def _serve(self, act: Callable[..., None], connection: _Connection, *arguments: Answer) -> None:
        """Call *act* for *connection* unless it has been dropped. Drop it on failure."""
        if connection in self._connections:
            try:
                act(connection, *arguments)
            except OSError:
                self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.client.recv(_RECEIVE)
        except BlockingIOError:
            return
        if not data:
            self._drop(connection)
            return
        if connection.answering:
            self._pause(connection)  # data after the request
            return
        try:
            request = connection.exchange.receive(data)
        except HttpError as refused:
            self._answer(connection, refused.answer)
            return
        if request is None:
            self._pause(connection)
        else:
            answer = self._made(lambda: connection.handler(request), request)
            if isinstance(answer, Slow):
                self._make_slowly(connection, request, answer)
            else:
                self._answer(connection, answer)

    def _pause(self, connection: _Connection) -> None:
        self._selector.unregister(connection.client)
        self._paused[connection] = time.monotonic() + _PAUSE

    @staticmethod
    def _made(make: Callable[[], Answer | Slow], request: Request) -> Answer | Slow:
        try:
            return make()
        except Exception:  # a bug in a handler must not end the server
            asked = f"{request.method} {request.path}"[:80]
            log.exception("HTTP handler failed", extra={"fields": {"request": asked}})
            return Answer(500, b"internal error\n")

    def _make_slowly(self, connection: _Connection, request: Request, slow: Slow) -> None:
        connection.answering = True
        connection.deadline = time.monotonic() + slow.seconds + self._connection_seconds
        if not self._slow.add(request, slow, connection):
            self._answer(connection, _BUSY)

    def _start_slowly(self, job: Job[_Connection]) -> None:
        def make() -> None:
            cpu, started = time.thread_time(), time.monotonic()
            answer = self._made(lambda: job.slow.make(job.abandoned), job.request)
            assert isinstance(answer, Answer)
            # Most answers have other threads and programs do a part of the work. A profile only waits.
            waits = job.slow.turn is Turn.AT_ONCE
            cost = time.thread_time() - cpu if waits else time.monotonic() - started
            self._do(lambda: self._finish_slowly(job, answer, cost))

        try:
            threading.Thread(target=make, name="http-slow", daemon=True).start()
        except RuntimeError:  # the process may have no more threads
            self._finish_slowly(job, _BUSY, 0.0)

    def _finish_slowly(self, job: Job[_Connection], answer: Answer, cost: float) -> None:
        for connection in self._slow.made(job, cost, time.monotonic()):
            self._serve(self._answer, connection, answer)

    def _answer(self, connection: _Connection, answer: Answer) -> None:
        if self._paused.pop(connection, None) is not None:
            self._selector.register(connection.client, selectors.EVENT_READ, connection)
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        connection.unsent = memoryview(connection.exchange.render(answer, date))
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            sent = connection.client.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        connection.unsent = connection.unsent[sent:]
        if connection.unsent:
            self._selector.modify(connection.client, selectors.EVENT_WRITE, connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._slow.leave(connection)
        if self._paused.pop(connection, None) is None:
            self._selector.unregister(connection.client)
        connection.client.close()


def _listen(address: Address, port: int, both_families: bool) -> socket.socket:
    unspecified = not any(address)
    if both_families and unspecified:
        try:
            return _socket(socket.AF_INET6, "::", port, v6_only=False)
        except OSError as error:
            if error.errno not in _NO_SUCH_FAMILY:
                raise
    return _socket(family_of(address).af, format_address(address), port, v6_only=True)


def _socket(family: socket.AddressFamily, host: str, port: int, v6_only: bool) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
        listening.bind((host, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening
