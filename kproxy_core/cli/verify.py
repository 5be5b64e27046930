"""``kproxy verify --traffic``: TCP connections to every frontend, and the endpoints that they reach."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import click

from kproxy_core.app.control import send_request
from kproxy_core.app.requests import Targets
from kproxy_core.app.verify import (
    ANSWERED,
    BY_UNKNOWN,
    HUNG,
    PROBLEM,
    REFUSED,
    Attempt,
    Expectation,
    connections,
    is_settled,
    result,
)
from kproxy_core.cli.diff import DIFFERENT, SAME
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import cli_errors
from kproxy_core.cli.terminal import bad, good, hint, show_answer
from kproxy_core.config.flags import RULES, SOURCES, Flags
from kproxy_core.linux.conntrack_events import FlowEvent, flow_events
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, Protocol, family_of, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.model.timing import TokenBucket
from kproxy_core.netlink.sockets import Announcements

Found = Mapping[str, Any]

_Local = tuple[int, Address, int]
"""Protocol, address and port of a socket."""

OpenSocket = Callable[[int, int], socket.socket]
"""Returns a socket of an address family and a kind."""

_REFUSALS = {errno.ECONNREFUSED, errno.ECONNRESET}
_REASONS = {errno.EINVAL: "a blackhole route"}
_MOST_AT_ONCE = 200


class _Connection(NamedTuple):
    target: int
    protocol: Protocol
    deadline: float
    local: _Local


class Connector:
    """Opens TCP connections to targets at a limited rate, and closes them at once.

    See `kproxy_core.app.verify.expectation` for the targets. Those with ``protocol`` UDP get an empty
    datagram.
    """

    def __init__(
        self, targets: Sequence[Expectation], events: Announcements[FlowEvent] | None, *,
        rate: float, most: int, timeout: float, open_socket: OpenSocket = socket.socket,
        source: Address | None = None,
    ) -> None:
        """Open *rate* connections per second, at most *most* to each target. *timeout* in seconds.

        Without *events* of connection tracking, endpoints are unknown. *source* None: the kernel chooses it.
        """
        self._open_socket, self._source = open_socket, source
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
        protocol = Protocol[self._targets[at].get("protocol", "TCP")]
        is_tcp = protocol is Protocol.TCP
        sock = self._open_socket(family_of(address).af, socket.SOCK_STREAM if is_tcp else socket.SOCK_DGRAM)
        sock.setblocking(False)
        if self._source is not None:
            sock.bind((format_address(self._source), 0))
        code = sock.connect_ex((format_address(address), port))
        if not (code or is_tcp):
            code = _code_of(lambda: sock.send(b"")) or errno.EINPROGRESS
        local = protocol, parse_address(sock.getsockname()[0]), int(sock.getsockname()[1])
        self._open[sock] = _Connection(at, protocol, time.monotonic() + self._timeout, local)
        if code == errno.EINPROGRESS:
            self._selector.register(sock, selectors.EVENT_WRITE if is_tcp else selectors.EVENT_READ)
        else:
            self._end(sock, _result(code))

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            self._end(sock, _result(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if self._open[sock].protocol is Protocol.TCP else _code_of(partial(sock.recv, 1))))
        now = time.monotonic()
        for sock in [sock for sock, connection in self._open.items() if connection.deadline <= now]:
            self._end(sock, HUNG)

    def _end(self, sock: socket.socket, result: str) -> None:
        connection = self._open.pop(sock)
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        sock.close()
        for event in self._events.read() if self._events is not None else ():
            if event.protocol in (Protocol.TCP, Protocol.UDP):
                local, reply = (event.protocol, *event.original[:2]), event.reply
                self._endpoints[local] = Destination(reply.source, reply.source_port)
        endpoint = self._endpoints.pop(connection.local, None)
        self._attempts[connection.target].append(Attempt(result, endpoint, connection.local[1]))


def _code_of(act: Callable[[], object]) -> int:
    """Return the error number of *act*; 0: none."""
    try:
        act()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _result(code: int) -> str:
    if not code:
        return ANSWERED
    return REFUSED if code in _REFUSALS else _REASONS.get(code) or os.strerror(code).lower()


def read_targets(flags: Flags, service: str) -> Found:
    """Return the mode, and the expected results of connections from this node to each TCP frontend.

    Raises NoAnswer, NoProxy or RequestRefused, and as `cli_errors` expects.
    """
    request = Targets(service=service)
    if not OBJECTS & set(flags):
        return send_request(request)
    from kproxy_core.app.answers import targets
    from kproxy_core.cli.objects import read_objects

    with read_objects(flags, this_machine=True) as found:
        return targets(request, found)


def verify(found: Found, *, rate: float, most: int, timeout: float) -> tuple[Found, str]:
    """Open the connections. Return the results, and the reason if endpoints are unknown, else ""."""
    targets, problem = found["targets"], ""
    with contextlib.ExitStack() as stack:
        events = None
        try:
            events = stack.enter_context(flow_events(only_new=True))
        except HostError as error:
            problem = f"endpoints are not told apart: {error}"
        attempts: Sequence[Sequence[Attempt]] = Connector(
            targets, events, rate=rate, most=most, timeout=timeout).run()
    results = [result(target, tried) for target, tried in zip(targets, attempts, strict=True)]
    return {"mode": found["mode"], "tried": dict(TRIED), "frontends": results}, problem


TRIED: Mapping[str, Any] = {"from": "node", "protocols": ["TCP"], "not_from": ["pod", "outside"]}
"""What a verification shows, and what it does not."""
_NOT_TRIED = (
    "tried by TCP from this node only: packets of pods and from outside pass other rules and the node's "
    "forwarding; `kproxy explain` follows them, `kproxy doctor` looks for what stops them")


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
    verdicts = Counter(frontend["verdict"] for frontend in found["frontends"])
    count, wrong, unknown = verdicts.total(), verdicts[PROBLEM], verdicts[BY_UNKNOWN]
    if wrong:
        lines.append(bad(f"{wrong} of {count} frontends have problems"))
    else:
        well = f"{count - unknown} of {count} frontends do what the plans say, from this node"
        lines.append(good(f"{well} ({found['mode']})"))
    if unknown:
        lines.append(hint(f"{unknown} of {count} answer, and connection tracking does not know by whom"))
    lines.append(hint(_NOT_TRIED))
    return "\n".join(lines)


def _lines(frontend: Mapping[str, Any]) -> Iterator[str]:
    shown = {PROBLEM: bad, BY_UNKNOWN: hint}.get(frontend["verdict"], good)
    yield f"{frontend['frontend']}/TCP of {frontend['service_port']}: {shown(frontend['verdict'])}"
    for reached in frontend["reached"]:
        counts = ", ".join(f"{name} {count}" for name, count in reached.items() if name != "endpoint")
        yield f"  {reached['endpoint'] or 'endpoint not known':24}  {counts}"
    seen = {reached["endpoint"] for reached in frontend["reached"]}
    missed = [endpoint for endpoint in frontend["endpoints"] if endpoint not in seen]
    if missed and "" not in seen:
        yield hint(f"  not chosen in {frontend['connections']} connections: {', '.join(missed)}")
    for problem in frontend["problems"]:
        yield f"  {bad(problem)}"
    if frontend["problems"]:
        yield hint(f"  `kproxy explain node {frontend['frontend']} --probe` says which rules such packets "
                   "meet, and what the endpoints themselves answer")


@click.command("verify", cls=FlagCommand)
@click.argument("to", metavar="[TO]", default="")
@click.option("--traffic", is_flag=True, help="Required: open connections. `kproxy diff` opens none.")
@click.option("--service", metavar="TO", default="", hidden=True, help="As TO.")
@click.option("--rate", metavar="N", type=click.FloatRange(0.1, 10_000), default=50, show_default=True,
              help="Connections per second.")
@click.option("--connections", metavar="N", type=click.IntRange(1), default=50, show_default=True,
              help="Maximum number of connections to one frontend.")
@click.option("--timeout", metavar="SECONDS", type=click.FloatRange(0.1, 60), default=2, show_default=True,
              help="Timeout of a connection attempt.")
@click.option("--dry-run", is_flag=True, help="Only list the connections that would be opened.")
@VERBOSE
@with_flags(RULES, SOURCES)
@OUTPUT
def command(
    to: str, traffic: bool, service: str, rate: float, connections: int, timeout: float, dry_run: bool,
    output: str, **options: Any,
) -> int:
    """Connect to every Service by TCP, and report which endpoints answer.

    With TO, [NAMESPACE/]SERVICE[:PORT], only to that one. The connections are opened by this node to each
    frontend, and closed at once: no data is sent. That shows nothing of packets from pods and from outside.
    Exit status: 0 if all do what the plans say, 1 if some do not, or that is unclear.

    The plans are those of the running proxy. With --manifests, --kubeconfig, --master or --config, they are
    made from those objects; the rules may be those of a kube-proxy.
    """
    if not traffic:
        raise click.UsageError("--traffic is required: it opens connections; `kproxy diff` needs none")
    with cli_errors():
        found = read_targets(given(options), to or service)
    if dry_run:
        show_answer(found, output, lambda _: "\n".join(announced(found, connections, rate)))
        return SAME
    results, problem = verify(found, rate=rate, most=connections, timeout=timeout)
    if problem:
        click.echo(f"Warning: {problem}", err=True)
    show_answer(results, output, as_text)
    return status_of(results)
