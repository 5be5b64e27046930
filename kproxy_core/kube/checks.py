"""Checks of Forwards' endpoints from this node: a source whose slices say which endpoints are ready.

One thread makes all checks, without blocking: hundreds of endpoints cost it a fraction of a processor. An
endpoint of many Forwards is checked once for all that ask for the same check.
"""

import enum
import errno
import heapq
import logging
import os
import re
import resource
import select
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.kube.verdicts import Verdict, left_out, patience
from kproxy_core.model.address import Family, family_of, format_address, format_socket
from kproxy_core.model.events import BadObject, Complete, Emit, Event, SliceGone, SliceSet, Source
from kproxy_core.model.service import Check, Destination, EndpointSlice, ServiceName, SliceName
from kproxy_core.netlink.sockets import PollThread

log = logging.getLogger("kproxy.checks")

_MOST_AT_ONCE = 4096
"""Limit for the checks that wait for an answer, each with a socket."""
_OTHER_DESCRIPTORS = 256
"""Descriptors that checks leave to the rest of the process."""
_USUAL_DESCRIPTORS = 1024
"""Assumed limit of descriptors where it cannot be read."""
_LONGEST_HOLD = 1.5
"""Longest time in seconds for which a start waits for first checks: silent endpoints must not delay it."""
_SHORTAGES = frozenset({
    errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EADDRNOTAVAIL})
"""Errors of this machine, which say nothing about an endpoint."""
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r\n]")
_MOST_READ = 4096
"""Bytes of an answer over HTTP that are read: its status is in the first line."""


class Group(NamedTuple):
    """The endpoints of one Forward in one family: one of them is always used."""

    service: ServiceName
    family: Family


class Target(NamedTuple):
    """An endpoint of a group."""

    group: Group
    where: Destination

    @property
    def fields(self) -> dict[str, str]:
        """Return its names for logs and metrics."""
        return {"forward": self.group.service.name, "endpoint": format_socket(*self.where)}


class Server(NamedTuple):
    """What is checked: an endpoint of any number of groups, in one way."""

    where: Destination
    check: Check


class Use(enum.Enum):
    """Whether an endpoint is used. The values are for logs."""

    USED = "endpoint is used again, its check succeeds"
    KEPT = "check of an endpoint fails, it is used because no other is left"
    LEFT_OUT = "endpoint is left out, its check fails"


class Checked(Struct):
    """What is known about a target."""

    check: Check
    use: Use = Use.USED
    because: str = ""
    """Why its checks fail; "": they do not."""
    successes: int = 0
    failures: int = 0
    impossible: int = 0
    """Checks that this machine could not make."""

    @property
    def is_left_out(self) -> bool:
        return self.use is Use.LEFT_OUT


class _State(Struct):
    """What is known about a server."""

    groups: dict[Group, None] = {}
    verdict: Verdict = Verdict()
    because: str = ""
    """Why its last check that failed did; "": it works."""
    turn: int = 0
    """Number of its next or current check: results and dates with another number are out of date."""
    has_answered: bool = False
    """It answered its last check, or failed for the first time since it did: its check is urgent."""
    successes: int = 0
    failures: int = 0
    impossible: int = 0


class _Members(Struct):
    """The checked slices of a group, and their endpoints."""

    given: dict[SliceName, SliceSet] = {}
    """As the source has delivered them."""
    passed: dict[SliceName, EndpointSlice] = {}
    """As they were passed on."""
    servers: dict[Destination, Server] = {}
    uses: dict[Destination, Use] = {}
    failing: dict[Destination, None] = {}
    """Those whose checks fail, in the order in which that began."""


class _Probe:
    """One check that waits for an answer. Non-blocking."""

    def __init__(self, server: Server, turn: int, now: float, *, is_urgent: bool) -> None:
        """Start it. Raises OSError."""
        self.server = server
        self.turn = turn
        self.is_urgent = is_urgent
        self.started = now
        self.ends = now + patience(server.check.every)
        self.has_ended = False
        self._answer = b""
        address, port = server.where
        self._socket = socket.socket(family_of(address).af, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        error = self._socket.connect_ex((format_address(address), port))
        if error not in (0, errno.EINPROGRESS):
            self._socket.close()
            raise OSError(error, os.strerror(error))
        self.awaits = select.EPOLLOUT

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.has_ended = True
        self._socket.close()

    def proceed(self) -> str | None:
        """Go on after an event. Return why the check fails, "" if it succeeds, None if it waits on.

        Raises OSError for a failure, too.
        """
        if self.awaits == select.EPOLLOUT:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if not self.server.check.path:
                return ""
            self._socket.send(self._request())  # fits into the buffer of a new socket
            self.awaits = select.EPOLLIN
            return None
        part = self._socket.recv(_MOST_READ)
        self._answer += part
        if found := _STATUS_LINE.match(self._answer):
            return "" if 200 <= int(found[1]) < 400 else f"status {int(found[1])}"
        if not part or b"\n" in self._answer or len(self._answer) >= _MOST_READ:
            return "the answer is not HTTP"
        return None

    def _request(self) -> bytes:
        host = format_socket(*self.server.where)
        return (f"GET {self.server.check.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kproxy\r\n"
                "Accept: */*\r\nConnection: close\r\n\r\n").encode("ascii")  # fmt: skip


_Result = tuple[Server, int, float, str]
"""A server, the turn of its check, when that began, and why it failed; "": it did not."""


class CheckedSource:
    """Passes on the events of another source, with the endpoints of checked slices as their checks say.

    `Complete` is passed on once every endpoint known then has been checked once, so that a start does not
    use an endpoint that was left out before; silent endpoints hold it up for `_LONGEST_HOLD` at most.

    Checks of endpoints that answer precede those of endpoints that do not, which have at most half of all
    sockets: silent endpoints delay no other's check.
    """

    _epoll: select.epoll
    """Made with the thread, as `_bell`: by the first slice that is checked."""
    _bell: int

    def __init__(self, source: Source) -> None:
        self.kinds = source.kinds
        self._source = source
        self._lock = threading.Lock()
        """Guards what both the source's thread and that of the checks use."""
        self._groups: dict[Group, _Members] = {}
        self._group_of: dict[SliceName, Group] = {}
        self._servers: dict[Server, _State] = {}
        self._unknown: set[Server] = set()
        """Those that were not checked yet."""
        self._held: list[Event] = []
        """`Complete` events that wait for first checks."""
        self._held_until = 0.0
        """Monotonic seconds."""
        self._urgent: list[tuple[float, int, Server]] = []
        """A heap of the next checks of servers that answer: when (monotonic seconds), and their turn."""
        self._others: list[tuple[float, int, Server]] = []
        """The same of all others."""
        self._turns = count(1)
        self._probes: dict[int, _Probe] = {}
        """Checks that wait for an answer, by descriptor. Only their thread uses it and the next two."""
        self._ends: list[tuple[float, int, _Probe]] = []
        """A heap of their ends, and of those of checks that have ended."""
        self._waiting_others = 0
        """How many of them are not urgent."""
        self._most_at_once = _MOST_AT_ONCE
        self._shortage = ""
        """What the machine was last short of."""
        self._thread: PollThread | None = None

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._source.start(self._take)

    def stop(self) -> None:
        self._source.stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
            self._epoll.close()
            os.close(self._bell)
            for probe in self._probes.values():
                probe.close()

    def problems(self) -> Iterable[BadObject]:
        """Return those of the source, and the Forwards with endpoints whose checks fail."""
        with self._lock:
            failing = {
                group: {where: self._servers[members.servers[where]].because for where in members.failing}
                for group, members in self._groups.items() if members.failing
            }  # fmt: skip
            numbers = {group: len(self._groups[group].servers) for group in failing}
        return [*self._source.problems(), *(
            BadObject("Forward", group.service.name, "to", _failing(numbers[group], of_group))
            for group, of_group in failing.items())]

    def results(self) -> list[tuple[Target, Checked]]:
        """Return what is known about every endpoint that is checked. From any thread."""
        with self._lock:
            return [
                (Target(group, where), Checked(
                    server.check, members.uses.get(where, Use.USED), state.because, state.successes,
                    state.failures, state.impossible))
                for group, members in self._groups.items() for where, server in members.servers.items()
                for state in (self._servers[server],)
            ]

    # From the source ---------------------------------------------------------------------------

    def _take(self, events: list[Event]) -> None:
        with self._lock:
            passed: list[Event] = []
            touched: dict[Group, None] = {}
            for event in events:
                if isinstance(event, Complete):
                    self._held.append(event)
                    self._held_until = time.monotonic() + _LONGEST_HOLD
                    continue
                if isinstance(event, SliceSet | SliceGone):
                    touched.update(dict.fromkeys(self._note_slice(event)))
                if not (isinstance(event, SliceSet) and event.check is not None):
                    passed.append(event)
            for group in touched:
                self._follow(group)
            if self._thread is not None:
                os.eventfd_write(self._bell, 1)
            elif self._servers:
                self._begin()
            self._pass(passed, touched)

    def _note_slice(self, event: SliceSet | SliceGone) -> Iterator[Group]:
        """Note a slice that is checked now, or no more. Yield the groups that are concerned."""
        name = event.slice.name if isinstance(event, SliceSet) else event.name
        before = self._group_of.pop(name, None)
        if before is not None:
            yield before
            del self._groups[before].given[name]
            self._groups[before].passed.pop(name, None)
        if isinstance(event, SliceSet) and event.check is not None:
            group = self._group_of[name] = Group(event.slice.service, event.slice.family)
            yield group
            self._groups.setdefault(group, _Members()).given[name] = event

    def _follow(self, group: Group) -> None:
        """Check the endpoints of *group* from now on, and no others."""
        members = self._groups[group]
        wanted = {
            where: Server(where, event.check)
            for event in members.given.values() if event.check is not None for where in _destinations(event)
        }
        for where, server in list(members.servers.items()):
            if wanted.get(where) != server:
                del members.servers[where]
                self._leave(server, group)
                if where not in wanted:
                    members.failing.pop(where, None)
                    members.uses.pop(where, None)
        for where, server in wanted.items():
            if where not in members.servers:
                members.servers[where] = server
                if (state := self._servers.get(server)) is None:
                    fails = where in members.failing  # by the check before, until the first of this one
                    state = self._servers[server] = _State(verdict=Verdict(fails))
                    self._unknown.add(server)
                    self._schedule(server, state, time.monotonic())
                elif state.verdict.fails:
                    members.failing.setdefault(where)
                else:
                    members.failing.pop(where, None)
                state.groups[group] = None
        if not members.given:
            del self._groups[group]

    def _leave(self, server: Server, group: Group) -> None:
        state = self._servers[server]
        del state.groups[group]
        if not state.groups:
            del self._servers[server]
            self._unknown.discard(server)

    def _begin(self) -> None:
        """Start the thread, and raise the soft limit of descriptors as far as checks may need it."""
        limit, wanted = _USUAL_DESCRIPTORS, _MOST_AT_ONCE + _OTHER_DESCRIPTORS
        with suppress(OSError, ValueError):
            limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if limit < wanted:
                raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
                limit = raised
        self._most_at_once = max(2, min(_MOST_AT_ONCE, limit - _OTHER_DESCRIPTORS))
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._thread = PollThread("kproxy-checks", self._epoll.fileno(), self._turn, first=0.0)

    def _schedule(self, server: Server, state: _State, at: float) -> None:
        state.turn = next(self._turns)
        heapq.heappush(self._urgent if state.has_answered else self._others, (at, state.turn, server))

    def _current(self, server: Server, turn: int) -> _State | None:
        """Return the state of *server* if the check number *turn* is its next or current one."""
        state = self._servers.get(server)
        return state if state is not None and state.turn == turn else None

    def _pass(self, events: list[Event], groups: Iterable[Group]) -> None:
        """Pass on *events*, and the slices of *groups* that differ now."""
        changed: dict[tuple[Server, Use], list[Group]] = {}
        for group in groups:
            members = self._groups.get(group)
            if members is None:
                continue
            out = self._left_out(group, members, changed)
            for name, event in members.given.items():
                ready = _without(event, out)
                if members.passed.get(name) != ready.slice:
                    members.passed[name] = ready.slice
                    events.append(ready)
        self._log_uses(changed)
        if self._held and (not self._unknown or time.monotonic() >= self._held_until):
            events += self._held
            self._held = []
        if events:
            self._emit(events)

    @staticmethod
    def _left_out(
        group: Group, members: _Members, changed: dict[tuple[Server, Use], list[Group]]
    ) -> set[Destination]:
        """Return the endpoints of *group* that are not used, and note which that concerns newly."""
        weights = {
            where: event.slice.weight for event in members.given.values() for where in _destinations(event)}
        out = left_out(weights, members.failing)
        for where in weights:
            use = Use.LEFT_OUT if where in out else Use.KEPT if where in members.failing else Use.USED
            if use is not members.uses.get(where, Use.USED):
                members.uses[where] = use
                changed.setdefault((members.servers[where], use), []).append(group)
        return out

    def _log_uses(self, changed: dict[tuple[Server, Use], list[Group]]) -> None:
        """Log a line for each server, not for each Forward that it serves."""
        for (server, use), groups in changed.items():
            fields: dict[str, object] = dict(Target(groups[0], server.where).fields)
            if len(groups) > 1:
                fields["forwards"] = len(groups)
            if use is Use.USED:
                log.info(use.value, extra={"fields": fields})
            else:
                because = self._servers[server].because
                log.warning(use.value, extra={"fields": {**fields, "because": because}})

    # The thread of the checks ------------------------------------------------------------------

    def _turn(self) -> float | None:
        """Read answers, give up what waits for too long, start what is due. Return the seconds to wait."""
        results: list[_Result] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
            elif (why := self._proceed(self._probes[descriptor])) is not None:
                results.append(self._end(self._probes[descriptor], why))
        now = time.monotonic()
        while self._ends and (self._ends[0][2].has_ended or self._ends[0][0] <= now):
            probe = heapq.heappop(self._ends)[2]
            if not probe.has_ended:
                why = f"no answer within {patience(probe.server.check.every):g} s"
                results.append(self._end(probe, why))
        with self._lock:
            self._judge([*results, *self._start_due(now)])
            times = [self._ends[0][0]] if self._ends else []
            if self._held:
                times.append(self._held_until)
                if now >= self._held_until:
                    self._pass([], ())
            times += [due[0][0] for due in self._startable()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end(self, probe: _Probe, why: str) -> _Result:
        del self._probes[probe.fileno()]
        self._waiting_others -= not probe.is_urgent
        probe.close()
        return probe.server, probe.turn, probe.started, why

    def _proceed(self, probe: _Probe) -> str | None:
        awaited = probe.awaits
        try:
            why = probe.proceed()
        except BlockingIOError:
            return None
        except OSError as error:
            return error.strerror or str(error)
        if why is None and probe.awaits != awaited:
            self._epoll.modify(probe.fileno(), probe.awaits)
        return why

    def _startable(self) -> Iterator[list[tuple[float, int, Server]]]:
        """Yield the heaps from which a check may be started once it is due."""
        if len(self._probes) < self._most_at_once:
            if self._urgent:
                yield self._urgent
            if self._others and self._waiting_others < self._most_at_once // 2:
                yield self._others

    def _start_due(self, now: float) -> Iterator[_Result]:
        """Start the checks that are due. Yield the results of those that fail at once."""
        for due, is_urgent in ((self._urgent, True), (self._others, False)):
            while due and due[0][0] <= now and len(self._probes) < self._most_at_once:
                if not is_urgent and self._waiting_others >= self._most_at_once // 2:
                    break
                _, turn, server = heapq.heappop(due)
                state = self._current(server, turn)
                if state is None:
                    continue
                try:
                    probe = _Probe(server, turn, now, is_urgent=is_urgent)
                except OSError as error:
                    why = error.strerror or str(error)
                    if error.errno in _SHORTAGES:
                        state.impossible += 1
                        self._postpone(server, state, now + server.check.every, why)
                    else:
                        yield server, turn, now, why
                    continue
                self._waiting_others += not is_urgent
                self._probes[probe.fileno()] = probe
                heapq.heappush(self._ends, (probe.ends, turn, probe))
                self._epoll.register(probe.fileno(), probe.awaits)

    def _postpone(self, server: Server, state: _State, at: float, why: str) -> None:
        """Check *server* later, and leave it as it is: this machine is short of something."""
        if why != self._shortage:
            self._shortage = why
            log.warning("endpoints cannot be checked", extra={"fields": {"because": why}})
        self._unknown.discard(server)
        self._schedule(server, state, at)
        if self._held:
            self._pass([], ())

    def _judge(self, results: Iterable[_Result]) -> None:
        groups: dict[Group, None] = {}
        was_unknown = bool(self._unknown)
        for server, turn, started, why in results:
            state = self._current(server, turn)
            if state is None:
                continue
            self._unknown.discard(server)
            if why:
                state.failures += 1
                state.because = why
            else:
                state.successes += 1
            before, state.verdict = state.verdict, state.verdict.after(success=not why)
            if not (why or state.verdict.fails):
                state.because = ""
            state.has_answered = not why or (state.has_answered and not state.verdict.fails)
            self._schedule(server, state, started + state.verdict.next_in(server.check.every))
            if state.verdict.fails is not before.fails:
                groups |= state.groups
                for group in state.groups:
                    failing = self._groups[group].failing
                    if why:
                        failing[server.where] = None
                    else:
                        failing.pop(server.where, None)
        if groups or (was_unknown and not self._unknown):
            self._pass([], groups)


def _failing(number: int, failing: Mapping[Destination, str]) -> str:
    """Return what is wrong with a Forward to *number* endpoints, from the *failing* ones and why."""
    first, why = next(iter(failing.items()))
    more = f" and {len(failing) - 1} more" if len(failing) > 1 else ""
    return (f"{number - len(failing)} of {number} endpoints pass their checks: "
            f"{format_socket(*first)}: {why}{more}")


def _destinations(event: SliceSet) -> Iterator[Destination]:
    """Yield the endpoints of a Forward's slice. All its ports have the same number."""
    for endpoint in event.slice.endpoints:
        yield Destination(endpoint.address, event.slice.ports[0].port)


def _without(event: SliceSet, out: Collection[Destination]) -> SliceSet:
    """Return *event* with the endpoints in *out* not ready."""
    if not out:
        return event
    endpoints = tuple(
        endpoint._replace(ready=False, serving=False) if where in out else endpoint
        for where, endpoint in zip(_destinations(event), event.slice.endpoints, strict=True)
    )
    return replace(event, slice=replace(event.slice, endpoints=endpoints))

