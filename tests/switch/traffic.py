"""Clients that open connections all the time, and the endpoints that answer them, as a program.

    traffic.py endpoint PORT ADDRESS...    send back what comes, over TCP and UDP
    traffic.py client TARGETS CONTROL      use the targets (JSON, see `Target`) until standard input ends

A client opens new connections and flows one after another to all targets, several at a time, and keeps
lasting ones that exchange bytes every few milliseconds. Ten times a second it prints how many were answered,
and what failed: refused, reset, without an answer, or answered only after a segment had been sent again. A
line ``renew`` on its standard input has it close its lasting connections in good order and open others.

Segments are also sent again when the machine has no time for anybody. That shows in the lasting connections
to CONTROL, which are endpoints themselves: their stalls are told as well.
"""

import contextlib
import itertools
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

TICK = 0.02
"""Seconds between two exchanges of a lasting connection."""
EACH_TICK = int(os.environ.get("SWITCH_EACH_TICK", "30"))
"""New ones at most: a client has 28,000 ports, and ended connections are tracked for up to two minutes."""
AT_ONCE = min(6, EACH_TICK)
"""New connections and flows at a time."""
REPORT = 0.1
STALL = 0.1
"""Seconds that an exchange with an endpoint itself takes only if the machine is busy."""
PATIENCE = float(os.environ.get("SWITCH_PATIENCE", "60")) / 20
"""Seconds after which an answer does not count any more."""
ORDERLY = 4
"""Every so many connections one ends with FINs; a reset spares both sides the time after that."""

_TOKEN = 16
_RESET = struct.pack("ii", 1, 0)
_SENT_AGAIN = slice(100, 104)
"""tcpi_total_retrans in struct tcp_info (linux/tcp.h); segments, SYN included."""


class Target(NamedTuple):
    """What clients dial."""

    protocol: str
    """``tcp`` or ``udp``."""
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.protocol} {self.address} {self.port}"


class Failure(Exception):
    """What a user would complain about."""


class SentAgain(Failure):
    """It was answered, but late."""


class Conversation:
    """One connection or flow."""

    def __init__(self, target: Target, number: int, *, lasting: bool) -> None:
        self.target, self.lasting = target, lasting
        self.number = number
        self.since = time.monotonic()
        self.waiting = True
        """For an answer; else a lasting one pauses."""
        self.connected = target.protocol == "udp"
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        kind = socket.SOCK_DGRAM if self.connected else socket.SOCK_STREAM
        self.socket = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        self._said = b""
        self._heard = b""
        with contextlib.suppress(BlockingIOError):
            self.socket.connect((target.address, target.port))
        if self.connected:
            self.say()

    @property
    def events(self) -> int:
        return select.EPOLLIN if self.connected else select.EPOLLOUT

    def say(self) -> None:
        self._said, self._heard = os.urandom(_TOKEN), b""
        self.since, self.waiting = time.monotonic(), True
        self.socket.send(self._said)

    def go_on(self) -> bool:
        """Something happened. True: it was answered. Raises Failure or OSError."""
        if not self.connected:
            problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, os.strerror(problem))
            self.connected = True
            self.say()
            return False
        heard = self.socket.recv(100)
        if not heard and self.target.protocol == "tcp":
            raise Failure("closed by the other side")
        self._heard += heard
        if len(self._heard) < _TOKEN:
            return False
        if self._heard != self._said:
            raise Failure("somebody else answered")
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
        self._stalls: list[tuple[float, float]] = []
        """Of the machine, from when to when."""
        self._numbers = itertools.count()
        self._conversations: dict[int, Conversation] = {}
        self._answered = dict.fromkeys(map(str, targets), 0)
        self._exchanged = self._renewals = 0
        self._failures: list[dict[str, object]] = []
        self._again: list[tuple[Target, int, bool]] = []
        """What could not begin, to be begun at the next tick."""
        self._left = EACH_TICK
        """New ones that may still begin in this tick."""
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
            if 0 in happened:  # last, for it closes others
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
        for target in [*self._targets, *self._control]:
            self._begin(target, 0, lasting=True)

    def _begin(self, target: Target, number: int, *, lasting: bool) -> None:
        try:
            conversation = Conversation(target, number, lasting=lasting)
        except OSError as error:
            self._failed(target, lasting, error, time.monotonic())
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
        if not answered:
            self._poll.modify(conversation.socket, conversation.events)
        elif conversation.lasting:
            self._exchanged += 1
        else:
            self._answered[str(conversation.target)] += 1
            self._end(conversation)
            if not self._ending:
                self._open()

    def _exchange(self, now: float) -> None:
        """Lasting ones go on, and what was not answered in time is given up."""
        self._left = EACH_TICK
        again, self._again = self._again, []
        for target, number, lasting in again if not self._ending else ():
            self._begin(target, number, lasting=lasting)
        for conversation in list(self._conversations.values()):
            if conversation.waiting:
                if now - conversation.since > PATIENCE:
                    self._give_up(conversation, Failure("no answer"))
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
            self._failed(conversation.target, conversation.lasting, error, conversation.since)
        self._end(conversation)
        if self._ending:
            return
        if conversation.lasting:
            self._begin(conversation.target, 0, lasting=True)
        else:
            self._open()

    def _failed(self, target: Target, lasting: bool, error: Exception, since: float) -> None:
        what = error.strerror if isinstance(error, OSError) else error
        self._failures.append({
            "since": since, "until": time.monotonic(), "sent_again": isinstance(error, SentAgain),
            "what": f"{'lasting' if lasting else 'new'} {target}: {what}",
        })  # fmt: skip

    def _end(self, conversation: Conversation) -> None:
        del self._conversations[conversation.socket.fileno()]
        conversation.close()

    def _obey(self) -> None:
        said = os.read(0, 4096)
        if not said:
            self._ending = True
            self._poll.unregister(0)
        for _ in range(said.count(b"renew\n")):
            for conversation in [c for c in self._conversations.values() if c.lasting]:
                self._end(conversation)
            self._open_lasting()
            self._renewals += 1

    def _report(self) -> None:
        failures, self._failures = self._failures, []
        stalls, self._stalls = self._stalls, []
        print(json.dumps({
            "answered": self._answered, "exchanged": self._exchanged, "renewals": self._renewals,
            "failures": failures, "stalls": stalls,
        }), flush=True)  # fmt: skip


def answer(port: int, addresses: Iterable[str]) -> None:
    """Be an endpoint."""
    poll = select.epoll()
    listeners: dict[int, socket.socket] = {}
    datagrams: dict[int, socket.socket] = {}
    connected: dict[int, socket.socket] = {}
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=4096)
        listener.setblocking(False)
        listeners[listener.fileno()] = listener
        udp = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        udp.bind((address, port))
        datagrams[udp.fileno()] = udp
        poll.register(listener, select.EPOLLIN)
        poll.register(udp, select.EPOLLIN)
    print("listening", flush=True)
    while True:
        for fd, _ in poll.poll():
            with contextlib.suppress(BlockingIOError):
                if fd in listeners:
                    client, _ = listeners[fd].accept()
                    client.setblocking(False)
                    connected[client.fileno()] = client
                    poll.register(client, select.EPOLLIN)
                elif fd in datagrams:
                    data, sender = datagrams[fd].recvfrom(100)
                    datagrams[fd].sendto(data, sender)
                else:
                    try:
                        data = connected[fd].recv(100)
                        if data:
                            connected[fd].send(data)
                    except ConnectionError:
                        data = b""
                    if not data:
                        connected.pop(fd).close()


if __name__ == "__main__":
    if sys.argv[1] == "endpoint":
        answer(int(sys.argv[2]), sys.argv[3:])
    else:
        Client(*([Target(*found) for found in json.loads(argument)] for argument in sys.argv[2:4])).run()
