"""Load on Services: clients that open connections continuously, and endpoints that answer.

    traffic.py endpoint PORT ADDRESS...    echo each request with the own address, over TCP and UDP
    traffic.py client TARGETS CONTROL      use the targets (JSON, see `Target`) until standard input ends

A client opens connections and flows to all targets in turn, several at a time, and keeps long-lived ones.
These ask for delayed answers, so that one is nearly always pending. Several times a second the client prints
the number of answers, and the failures: refused, reset, unanswered, answered only after a retransmission, or
a long-lived connection answered by another endpoint than before. The line ``renew`` on standard input
replaces the long-lived connections, closed in order, and ends once all pending requests are answered or have
timed out.

A busy machine causes retransmissions too. They show in long-lived connections to CONTROL, the endpoints
themselves, whose stalls are printed as well.
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, cycle, islice, repeat
from typing import NamedTuple

TICK = 0.02
"""Seconds between two rounds of new connections and requests."""
LATER = 0.1
"""Delay in seconds of an answer on a long-lived connection."""
EACH_TICK = int(os.environ.get("SWITCH_EACH_TICK", "30"))
"""Limit of new connections: a client has 28,000 ports, and conntrack keeps ended ones up to two minutes."""
AT_ONCE = min(6, EACH_TICK)
"""Limit of concurrent new connections and flows."""
REPORT = 0.2
STALL = 0.1
"""An exchange with CONTROL that takes this many seconds shows a busy machine."""
PATIENCE = float(os.environ.get("SWITCH_PATIENCE", "60")) / 20
"""Timeout of an answer in seconds."""
PORTS = range(1_024, 30_000)
"""Source ports, divided among the targets: IPVS confuses connections from one port to one endpoint through
different frontends (docs/ipvs.md). None is a node port, which a relay must be able to bind. Ports are reused
after a minute or more."""
ORDERLY = 4
"""One in this many connections ends with FINs, the others with a reset, which avoids TIME_WAIT."""

_QUESTION = struct.Struct("=B7sQ")
"""A flag for a delayed answer, the number of the program, the number of the question."""
_ANSWER = _QUESTION.size + 16
"""The question, and the endpoint's address."""
_RESET = struct.pack("ii", 1, 0)
_SENT_AGAIN = slice(100, 104)
"""tcpi_total_retrans in struct tcp_info (linux/tcp.h); segments, SYN included."""


class Target(NamedTuple):
    """A frontend to dial."""

    protocol: str
    """``tcp``, ``udp`` (a connected socket), or ``sendto`` (a socket that names the frontend each time)."""
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.protocol} {self.address} {self.port}"


class Failure(Exception):
    """A failure that a user would notice."""


class SentAgain(Failure):
    """The answer needed a retransmission."""


class Silence(Failure):
    """There was no answer."""


class Conversation:
    """One connection or flow."""

    _program = os.urandom(7)
    _questions = count()

    def __init__(
        self, target: Target, ports: Iterator[int], number: int, *, lasting: bool, later: bool
    ) -> None:
        """Bind the first free one of *ports*. *later*: ask for delayed answers."""
        self.target, self.lasting = target, lasting
        self.number = number
        self.since = time.monotonic()
        self.waiting = True
        """A request is pending."""
        self.connected = target.protocol != "tcp"
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        kind = socket.SOCK_DGRAM if self.connected else socket.SOCK_STREAM
        self.socket = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        self._later = later
        self._said = b""
        self._heard = b""
        self._endpoint = b""
        self._bind(ports)
        if target.protocol != "sendto":
            with contextlib.suppress(BlockingIOError):
                self.socket.connect((target.address, target.port))
        if self.connected:
            self.say()

    def _bind(self, ports: Iterator[int]) -> None:
        for port in islice(ports, len(PORTS)):
            with contextlib.suppress(OSError):  # In use, or held by an ended connection.
                self.socket.bind(("", port))
                return
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    @property
    def events(self) -> int:
        """The epoll events to wait for. A TCP socket becomes writable when it is connected."""
        return select.EPOLLIN if self.connected else select.EPOLLIN | select.EPOLLOUT | select.EPOLLET

    @property
    def phase(self) -> str:
        return "to a request" if self.connected else "to SYN"

    def say(self) -> None:
        self._said = _QUESTION.pack(self._later, self._program, next(self._questions))
        self._heard = b""
        self.since, self.waiting = time.monotonic(), True
        if self.target.protocol == "sendto":
            self.socket.sendto(self._said, (self.target.address, self.target.port))
        else:
            self.socket.send(self._said)

    def go_on(self) -> bool:
        """Handle an event. Return True for an answer. Raises Failure or OSError."""
        if not self.connected:
            dialled = self.since
            try:
                self.say()
            finally:
                self.since = dialled
            self.connected = True
            return False
        heard, sender = self.socket.recvfrom(100)
        if self.target.protocol == "sendto" and sender[:2] != (self.target.address, self.target.port):
            raise Failure(f"{sender} answered")
        if not heard and self.target.protocol == "tcp":
            raise Failure("closed by the other side")
        self._heard += heard
        if len(self._heard) < _ANSWER:
            return False
        endpoint = self._heard[_QUESTION.size :]
        # A mode switch may move an unconnected socket to another endpoint.
        stays = self.target.protocol == "sendto" or self._endpoint in (b"", endpoint)
        if self._heard[: _QUESTION.size] != self._said or not stays:
            raise Failure("another endpoint answered")
        self._endpoint = endpoint
        if self.target.protocol == "tcp":
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            if sent_again := int.from_bytes(info[_SENT_AGAIN], sys.byteorder):
                raise SentAgain(f"{sent_again} segments were sent again")
        self.waiting = False
        return True

    def close(self) -> None:
        if self.target.protocol == "tcp" and not self.lasting and self.number % ORDERLY:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.socket.close()


class Client:
    """All conversations of one program."""

    def __init__(self, targets: list[Target], control: list[Target]) -> None:
        self._poll = select.epoll()
        self._poll.register(0, select.EPOLLIN)
        self._targets = targets
        self._control = control
        self._ports = {
            target: cycle(PORTS[number :: len(targets)]) for number, target in enumerate(targets)
        } | {target: repeat(0) for target in control}
        self._stalls: list[tuple[float, float]] = []
        """Stalls of the machine: beginning and end."""
        self._numbers = count()
        self._conversations: dict[int, Conversation] = {}
        self._answered = dict.fromkeys(map(str, targets), 0)
        self._exchanged = self._renewals = 0
        self._failures: list[dict[str, object]] = []
        self._again: list[tuple[Target, int, bool]] = []
        """Targets whose connection could not be opened, to retry in the next round."""
        self._under_way: set[Conversation] = set()
        """Conversations that a renewal waits for."""
        self._left = EACH_TICK
        """New connections left in this round."""
        self._ending = False

    def run(self) -> None:
        for _ in range(AT_ONCE):
            self._open()
        self._open_lasting()
        report = tick = time.monotonic()
        while not (self._ending and not any(c.waiting for c in self._conversations.values())):
            happened = [fd for fd, _ in self._poll.poll(TICK)]
            for fd in happened:
                if fd in self._conversations:
                    self._serve(self._conversations[fd])
            if 0 in happened:  # last, because it closes others
                self._obey()
            now = time.monotonic()
            if now >= tick:
                tick = now + TICK
                self._exchange(now)
            if now >= report:
                report = now + REPORT
                self._report()
        self._report()

    def _open(self) -> None:
        number = next(self._numbers)
        target = self._targets[number % len(self._targets)]
        if self._left:
            self._left -= 1
            self._begin(target, number, lasting=False)
        else:
            self._again.append((target, number, False))

    def _open_lasting(self) -> None:
        for target in self._ports:
            self._begin(target, 0, lasting=True)

    def _begin(self, target: Target, number: int, *, lasting: bool) -> None:
        try:
            later = lasting and target not in self._control
            ports = self._ports[target]
            conversation = Conversation(target, ports, number, lasting=lasting, later=later)
        except OSError as error:
            self._failed(target, lasting, error, time.monotonic(), 0)
            self._again.append((target, number, lasting))
            return
        self._conversations[conversation.socket.fileno()] = conversation
        self._poll.register(conversation.socket, conversation.events)

    def _serve(self, conversation: Conversation) -> None:
        try:
            answered = conversation.go_on()
            if answered and conversation.target in self._control:
                self._note_stall(conversation)
        except BlockingIOError:
            return
        except (OSError, Failure) as error:
            self._give_up(conversation, error)
            return
        if answered and conversation.lasting:
            self._exchanged += 1
            if conversation in self._under_way:
                self._end(conversation)
        elif answered:
            self._answered[str(conversation.target)] += 1
            self._end(conversation)
            if not self._ending:
                self._open()

    def _exchange(self, now: float) -> None:
        """Send the next requests on long-lived connections, and give up unanswered ones."""
        self._left = EACH_TICK
        again, self._again = self._again, []
        for target, number, lasting in again if not self._ending else ():
            self._begin(target, number, lasting=lasting)
        for conversation in list(self._conversations.values()):
            if conversation.waiting:
                if now - conversation.since > PATIENCE:
                    self._give_up(conversation, Silence(f"no answer {conversation.phase}"))
            elif not self._ending:
                try:
                    conversation.say()
                except OSError as error:
                    self._give_up(conversation, error)

    def _note_stall(self, conversation: Conversation) -> None:
        now = time.monotonic()
        if now - conversation.since > STALL:
            self._stalls.append((conversation.since, now))

    def _give_up(self, conversation: Conversation, error: Exception) -> None:
        if conversation.target in self._control:
            self._stalls.append((conversation.since, time.monotonic()))
        else:
            port = conversation.socket.getsockname()[1]
            self._failed(conversation.target, conversation.lasting, error, conversation.since, port)
        replaced = conversation.lasting and conversation in self._under_way
        self._end(conversation)
        if self._ending or replaced:
            return
        if conversation.lasting:
            self._again.append((conversation.target, 0, True))
        else:
            self._open()

    def _failed(self, target: Target, lasting: bool, error: Exception, since: float, port: int) -> None:
        what = error.strerror if isinstance(error, OSError) else error
        self._failures.append({
            "since": since, "until": time.monotonic(), "sent_again": isinstance(error, SentAgain),
            "silence": isinstance(error, Silence), "port": port,
            "what": f"{'lasting' if lasting else 'new'} {target}: {what}",
        })  # fmt: skip

    def _end(self, conversation: Conversation) -> None:
        del self._conversations[conversation.socket.fileno()]
        conversation.close()
        if conversation in self._under_way:
            self._under_way.remove(conversation)
            self._renewals += not self._under_way

    def _obey(self) -> None:
        said = os.read(0, 4096)
        if not said:
            self._ending = True
            self._poll.unregister(0)
        for _ in range(said.count(b"renew\n")):
            before = list(self._conversations.values())
            self._under_way = {conversation for conversation in before if conversation.waiting}
            for conversation in before:
                if conversation.lasting and not conversation.waiting:
                    self._end(conversation)
            self._renewals += not self._under_way
            self._again = [each for each in self._again if not each[2]]
            self._open_lasting()

    def _report(self) -> None:
        failures, self._failures = self._failures, []
        stalls, self._stalls = self._stalls, []
        print(json.dumps({
            "answered": self._answered, "exchanged": self._exchanged, "renewals": self._renewals,
            "failures": failures, "stalls": stalls,
        }), flush=True)  # fmt: skip


Sender = tuple[str, int]
"""A socket address as the socket module has it."""


class Endpoint:
    """An endpoint's server, on all its addresses."""

    def __init__(self, port: int, addresses: Iterable[str]) -> None:
        self._poll = select.epoll()
        self._listeners: dict[int, tuple[socket.socket, bytes]] = {}
        """Sockets by file descriptor, each with the end of its answers."""
        self._sockets: dict[int, tuple[socket.socket, bytes]] = {}
        self._later: deque[tuple[float, socket.socket, bytes, Sender]] = deque()
        """Delayed answers and their times."""
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            name = socket.inet_pton(family, address).ljust(16)
            listener = socket.create_server((address, port), family=family, backlog=4096)
            listener.setblocking(False)
            self._listeners[listener.fileno()] = listener, name
            self._poll.register(listener, select.EPOLLIN)
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            datagrams.bind((address, port))
            self._add(datagrams, name)

    def run(self) -> None:
        while True:
            for fd, _ in self._poll.poll(self._next_in()):
                if fd not in self._listeners:
                    self._hear(*self._sockets[fd])
                    continue
                with contextlib.suppress(BlockingIOError):
                    listener, name = self._listeners[fd]
                    self._add(listener.accept()[0], name)
            while self._later and self._later[0][0] <= time.monotonic():
                _, sock, data, sender = self._later.popleft()
                self._send(sock, data, sender)

    def _next_in(self) -> float | None:
        return max(0, self._later[0][0] - time.monotonic()) if self._later else None

    def _add(self, sock: socket.socket, name: bytes) -> None:
        self._sockets[sock.fileno()] = sock, name
        self._poll.register(sock, select.EPOLLIN)

    def _hear(self, sock: socket.socket, name: bytes) -> None:
        try:
            data, sender = sock.recvfrom(100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            del self._sockets[sock.fileno()]
            sock.close()
        elif data[0]:
            self._later.append((time.monotonic() + LATER, sock, data + name, sender))
        else:
            self._send(sock, data + name, sender)

    @staticmethod
    def _send(sock: socket.socket, data: bytes, sender: Sender) -> None:
        with contextlib.suppress(OSError):  # The client or the network is gone.
            if sock.type == socket.SOCK_DGRAM:
                sock.sendto(data, sender)
            else:
                sock.send(data)


if __name__ == "__main__":
    if sys.argv[1] == "endpoint":
        endpoint = Endpoint(int(sys.argv[2]), sys.argv[3:])
        print("listening", flush=True)
        endpoint.run()
    else:
        Client(*([Target(*found) for found in json.loads(argument)] for argument in sys.argv[2:4])).run()
