"""``kproxy verify --traffic``."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kproxy_core.app.control import send_request
from kproxy_core.app.explain import ANSWERED, HUNG, REFUSED, Attempt, Dialled, connections, is_settled, result
from kproxy_core.cli.diff import DIFFERENT, SAME
from kproxy_core.cli.options import OBJECTS
from kproxy_core.cli.terminal import bad, good, hint
from kproxy_core.config.flags import Flags
from kproxy_core.linux.conntrack import FlowEvent
from kproxy_core.linux.netlink import Announcements
from kproxy_core.model.address import Address, Protocol, family_of, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.model.timing import TokenBucket

# TCP connections to frontends, opened at a limited rate and closed at once.

_Local = tuple[Address, int]

_REFUSALS = {errno.ECONNREFUSED, errno.ECONNRESET}
_MOST_AT_ONCE = 200


class _Connection(NamedTuple):
    target: int
    deadline: float
    local: _Local


class Connector:
    """Opens connections to targets; see `kproxy_core.app.explain.expectation`."""

    def __init__(
        self, targets: Sequence[Dialled], events: Announcements[FlowEvent] | None, *,
        rate: float, most: int, timeout: float,
    ) -> None:
        """Open *rate* connections a second, *most* for each target. *timeout*: seconds until one hangs.

        Without *events* of the connection tracking, endpoints are not known.
        """
        self._targets = targets
        self._events = events
        self._bucket = TokenBucket(1 / rate, 1)
        self._most = most
        self._timeout = timeout
        self._open: dict[socket.socket, _Connection] = {}
        self._endpoints: dict[_Local, Destination] = {}
        self._attempts: list[list[Attempt]] = [[] for _ in targets]
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[list[Attempt]]:
        waiting = deque((at, connections(target, self._most)) for at, target in enumerate(self._targets))
        try:
            while waiting or self._open:
                self._wait(0.05 if waiting else 0.2)
                while waiting and len(self._open) < _MOST_AT_ONCE and self._bucket.try_take(time.monotonic()):
                    at, left = waiting.popleft()
                    if self._attempts[at] and is_settled(self._targets[at], self._attempts[at]):
                        continue
                    self._connect(at)
                    if left > 1:
                        waiting.append((at, left - 1))
        finally:
            self._selector.close()
            for sock in self._open:
                sock.close()
        return self._attempts

    def _connect(self, at: int) -> None:
        address, port = Destination.parse(self._targets[at]["frontend"])
        sock = socket.socket(family_of(address).af, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex((format_address(address), port))
        local = parse_address(sock.getsockname()[0]), int(sock.getsockname()[1])
        self._open[sock] = _Connection(at, time.monotonic() + self._timeout, local)
        if code == errno.EINPROGRESS:
            self._selector.register(sock, selectors.EVENT_WRITE)
        else:
            self._end(sock, _result(code))

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            assert isinstance(key.fileobj, socket.socket)
            self._end(key.fileobj, _result(key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
        now = time.monotonic()
        for sock in [sock for sock, connection in self._open.items() if connection.deadline <= now]:
            self._end(sock, HUNG)

    def _end(self, sock: socket.socket, result: str) -> None:
        connection = self._open.pop(sock)
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        sock.close()
        for event in self._events.read() if self._events is not None else ():
            if event.protocol == Protocol.TCP:
                reply = event.reply
                self._endpoints[event.original[:2]] = Destination(reply.source, reply.source_port)
        endpoint = self._endpoints.pop(connection.local, None)
        self._attempts[connection.target].append(Attempt(result, endpoint, connection.local[0]))


def _result(code: int) -> str:
    if not code:
        return ANSWERED
    return REFUSED if code in _REFUSALS else os.strerror(code).lower()


# ``kproxy verify --traffic``.

Found = Mapping[str, Any]


def read_targets(flags: Flags, service: str) -> Found:
    """Return the mode, and what connections of this node should do at each TCP frontend.

    Raises NoAnswer, NoProxy or RequestRefused, and as `cli_errors` expects.
    """
    if not OBJECTS & set(flags):
        found = send_request({"do": "targets", "service": service})
    else:
        from kproxy_core.app.answers import expectations
        from kproxy_core.app.explain import targets
        from kproxy_core.cli.objects import read_objects

        with read_objects(flags, this_machine=True) as (plans, _, instance, *_):
            found = {"mode": instance.mode, "targets": expectations(targets(plans, service), instance)}
    return found


def verify(found: Found, *, rate: float, most: int, timeout: float) -> tuple[Found, str]:
    """Open the connections. Return the results, and the reason why endpoints are unknown, if they are."""
    from contextlib import ExitStack

    from kproxy_core.linux.conntrack import flow_events
    from kproxy_core.linux.errors import HostError

    targets, problem = found["targets"], ""
    with ExitStack() as stack:
        events = None
        try:
            events = stack.enter_context(flow_events(only_new=True))
        except HostError as error:
            problem = f"endpoints are not told apart: {error}"
        attempts: Sequence[Sequence[Attempt]] = Connector(
            targets, events, rate=rate, most=most, timeout=timeout).run()
    results = [result(target, tried) for target, tried in zip(targets, attempts, strict=True)]
    return {"mode": found["mode"], "frontends": results}, problem


def status_of(found: Found) -> int:
    return DIFFERENT if any(frontend["problems"] for frontend in found["frontends"]) else SAME


def announced(found: Found, most: int, rate: float) -> Iterator[str]:
    total = 0
    for target in found["targets"]:
        count = connections(target, most)
        total += count
        yield (f"{target['frontend']}/TCP of {target['service_port']}: up to {count} connections, "
               f"should be {target['outcome']}")
    yield f"up to {total} connections in {total / rate:.0f} s"


def as_text(found: Found) -> str:
    lines = [line for frontend in found["frontends"] for line in _lines(frontend)]
    wrong = sum(bool(frontend["problems"]) for frontend in found["frontends"])
    count = len(found["frontends"])
    lines.append(bad(f"{wrong} of {count} frontends have problems") if wrong
                 else good(f"{count} of {count} frontends do what the plans say ({found['mode']})"))
    return "\n".join(lines)


def _lines(frontend: Mapping[str, Any]) -> Iterator[str]:
    verdict = bad("problem") if frontend["problems"] else good("ok")
    yield f"{frontend['frontend']}/TCP of {frontend['service_port']}: {verdict}"
    for reached in frontend["reached"]:
        counts = ", ".join(f"{name} {count}" for name, count in reached.items() if name != "endpoint")
        yield f"  {reached['endpoint'] or 'endpoint not known':24}  {counts}"
    seen = {reached["endpoint"] for reached in frontend["reached"]}
    missed = [endpoint for endpoint in frontend["endpoints"] if endpoint not in seen]
    if missed and "" not in seen:
        yield hint(f"  not chosen in {frontend['connections']} connections: {', '.join(missed)}")
    for problem in frontend["problems"]:
        yield f"  {bad(problem)}"
