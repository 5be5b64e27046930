"""Checks of Forwards' endpoints from this node: a source whose slices say which endpoints are ready.

One thread makes all checks, without blocking: hundreds of endpoints cost it a fraction of a processor.
"""

import enum
import errno
import heapq
import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from itertools import count
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.kube.verdicts import Verdict, left_out, patience
from kproxy_core.linux.netlink import PollThread
from kproxy_core.model.address import Family, family_of, format_address, format_socket
from kproxy_core.model.events import Complete, Emit, Event, SliceGone, SliceSet, Source
from kproxy_core.model.service import Check, Destination, EndpointSlice, ServiceName, SliceName

log = logging.getLogger("kproxy.checks")

_MOST_AT_ONCE = 256
"""Limit for the checks that wait for an answer, each with a socket."""
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
    """An endpoint that is checked."""

    group: Group
    where: Destination

    @property
    def fields(self) -> dict[str, str]:
        """Return its names for logs and metrics."""
        return {"forward": self.group.service.name, "endpoint": format_socket(*self.where)}


class Use(enum.Enum):
    """Whether an endpoint is used. The values are for logs."""

    USED = "endpoint is used again, its check succeeds"
    KEPT = "check of an endpoint fails, it is used because no other is left"
    LEFT_OUT = "endpoint is left out, its check fails"


class Checked(Struct):
    """What is known about a target."""

    check: Check
    verdict: Verdict = Verdict()
    use: Use = Use.USED
    because: str = ""
    """Why its last check failed; "": it did not."""
    turn: int = 0
    """Number of its next or current check: results and dates with another number are out of date."""
    successes: int = 0
    failures: int = 0
    impossible: int = 0
    """Checks that this machine could not make."""

    @property
    def is_left_out(self) -> bool:
        return self.use is Use.LEFT_OUT


class _Members(Struct):
    """The checked slices of a group, and their endpoints."""

    given: dict[SliceName, SliceSet] = {}
    """As the source has delivered them."""
    passed: dict[SliceName, EndpointSlice] = {}
    """As they were passed on."""
    checked: dict[Destination, Checked] = {}
    failing: dict[Destination, None] = {}
    """Those whose checks fail, in the order in which that began."""


class _Probe:
    """One check that waits for an answer. Non-blocking."""

    def __init__(self, target: Target, turn: int, check: Check, now: float) -> None:
        """Start it. Raises OSError."""
        self.target = target
        self.turn = turn
        self.check = check
        self.started = now
        self.ends = now + patience(check.every)
        self._answer = b""
        address, port = target.where
        self._socket = socket.socket(family_of(address).af, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        error = self._socket.connect_ex((format_address(address), port))
        if error not in (0, errno.EINPROGRESS):
            self._socket.close()
            raise OSError(error, os.strerror(error))
        self.awaits = select.EPOLLOUT

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def proceed(self) -> str | None:
        """Go on after an event. Return why the check fails, "" if it succeeds, None if it waits on.

        Raises OSError for a failure, too.
        """
        if self.awaits == select.EPOLLOUT:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if not self.check.path:
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
        host = format_socket(*self.target.where)
        return (f"GET {self.check.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: kproxy\r\n"
                "Accept: */*\r\nConnection: close\r\n\r\n").encode("ascii")  # fmt: skip


_Result = tuple[Target, int, float, str]
"""A target, the turn of its check, when that began, and why it failed; "": it did not."""


class CheckedSource:
    """Passes on the events of another source, with the endpoints of checked slices as their checks say.

    `Complete` is passed on once every endpoint known then has been checked once, so that a start does not
    use an endpoint that was left out before.
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
        self._unknown: set[Target] = set()
        """Those that were not checked yet."""
        self._held: list[Event] = []
        """`Complete` events that wait for first checks."""
        self._due: list[tuple[float, int, Target]] = []
        """A heap of the next checks: when (monotonic seconds), and their turn."""
        self._turns = count(1)
        self._probes: dict[int, _Probe] = {}
        """Checks that wait for an answer, by descriptor. Only the thread of the checks uses it."""
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

    def results(self) -> list[tuple[Target, Checked]]:
        """Return what is known about every endpoint that is checked. From any thread."""
        with self._lock:
            return [
                (Target(group, where), copy(checked))
                for group, members in self._groups.items() for where, checked in members.checked.items()
            ]

    # From the source ---------------------------------------------------------------------------

    def _take(self, events: list[Event]) -> None:
        with self._lock:
            passed: list[Event] = []
            touched: dict[Group, None] = {}
            for event in events:
                if isinstance(event, Complete):
                    self._held.append(event)
                    continue
                if isinstance(event, SliceSet | SliceGone):
                    touched.update(dict.fromkeys(self._note_slice(event)))
                if not (isinstance(event, SliceSet) and event.check is not None):
                    passed.append(event)
            for group in touched:
                self._follow(group)
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
            where: event.check
            for event in members.given.values() if event.check is not None for where in _destinations(event)
        }
        for where in members.checked.keys() - wanted.keys():
            del members.checked[where]
            members.failing.pop(where, None)
            self._unknown.discard(Target(group, where))
        now = time.monotonic()
        for where, check in wanted.items():
            known = members.checked.get(where)
            if known is None:
                members.checked[where] = Checked(check)
                self._unknown.add(Target(group, where))
                self._schedule(Target(group, where), now)
            elif known.check != check:
                known.check = check
                self._schedule(Target(group, where), now)
        if not members.given:
            del self._groups[group]
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)
        elif wanted:
            self._epoll = select.epoll()
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll.register(self._bell, select.EPOLLIN)
            self._thread = PollThread("kproxy-checks", self._epoll.fileno(), self._turn, first=0.0)

    def _schedule(self, target: Target, at: float) -> None:
        turn = self._groups[target.group].checked[target.where].turn = next(self._turns)
        heapq.heappush(self._due, (at, turn, target))

    def _current(self, target: Target, turn: int) -> Checked | None:
        """Return the state of *target* if the check number *turn* is its next or current one."""
        members = self._groups.get(target.group)
        checked = members.checked.get(target.where) if members is not None else None
        return checked if checked is not None and checked.turn == turn else None

    def _pass(self, events: list[Event], groups: Iterable[Group]) -> None:
        """Pass on *events*, and the slices of *groups* that differ now."""
        for group in groups:
            members = self._groups.get(group)
            if members is None:
                continue
            out = self._left_out(group, members)
            for name, event in members.given.items():
                ready = _without(event, out)
                if members.passed.get(name) != ready.slice:
                    members.passed[name] = ready.slice
                    events.append(ready)
        if self._held and not self._unknown:
            events += self._held
            self._held = []
        if events:
            self._emit(events)

    def _left_out(self, group: Group, members: _Members) -> set[Destination]:
        """Return the endpoints of *group* that are not used, and log which that concerns newly."""
        weights = {
            where: event.slice.weight for event in members.given.values() for where in _destinations(event)}
        out = left_out(weights, members.failing)
        for where in weights:
            checked = members.checked[where]
            use = Use.LEFT_OUT if where in out else Use.KEPT if where in members.failing else Use.USED
            if use is not checked.use:
                checked.use = use
                fields = Target(group, where).fields
                if use is Use.USED:
                    log.info(use.value, extra={"fields": fields})
                else:
                    log.warning(use.value, extra={"fields": {**fields, "because": checked.because}})
        return out

    # The thread of the checks ------------------------------------------------------------------

    def _turn(self) -> float | None:
        """Read answers, give up what waits for too long, start what is due. Return the seconds to wait."""
        ended: dict[_Probe, str] = {}
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
            elif (why := self._proceed(self._probes[descriptor])) is not None:
                ended[self._probes[descriptor]] = why
        now = time.monotonic()
        for probe in self._probes.values():
            if probe.ends <= now and probe not in ended:
                ended[probe] = f"no answer within {patience(probe.check.every):g} s"
        for probe in ended:
            del self._probes[probe.fileno()]
            probe.close()
        with self._lock:
            results = [(probe.target, probe.turn, probe.started, why) for probe, why in ended.items()]
            self._judge([*results, *self._start_due(now)])
            times = [probe.ends for probe in self._probes.values()]
            if self._due and len(self._probes) < _MOST_AT_ONCE:
                times.append(self._due[0][0])
        return max(0.0, min(times) - time.monotonic()) if times else None

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

    def _start_due(self, now: float) -> Iterator[_Result]:
        """Start the checks that are due. Yield the results of those that fail at once."""
        while self._due and self._due[0][0] <= now and len(self._probes) < _MOST_AT_ONCE:
            _, turn, target = heapq.heappop(self._due)
            checked = self._current(target, turn)
            if checked is None:
                continue
            try:
                probe = _Probe(target, turn, checked.check, now)
            except OSError as error:
                why = error.strerror or str(error)
                if error.errno in _SHORTAGES:
                    checked.impossible += 1
                    self._postpone(target, now + checked.check.every, why)
                else:
                    yield target, turn, now, why
                continue
            self._probes[probe.fileno()] = probe
            self._epoll.register(probe.fileno(), probe.awaits)

    def _postpone(self, target: Target, at: float, why: str) -> None:
        """Check *target* later, and leave it as it is: this machine is short of something."""
        if why != self._shortage:
            self._shortage = why
            log.warning("endpoints cannot be checked", extra={"fields": {"because": why}})
        self._unknown.discard(target)
        self._schedule(target, at)
        if self._held:
            self._pass([], ())

    def _judge(self, results: Iterable[_Result]) -> None:
        groups: dict[Group, None] = {}
        was_unknown = bool(self._unknown)
        for target, turn, started, why in results:
            checked = self._current(target, turn)
            if checked is None:
                continue
            self._unknown.discard(target)
            checked.because = why
            if why:
                checked.failures += 1
            else:
                checked.successes += 1
            before, checked.verdict = checked.verdict, checked.verdict.after(success=not why)
            self._schedule(target, started + checked.verdict.next_in(checked.check.every))
            if checked.verdict.fails is not before.fails:
                groups[target.group] = None
                failing = self._groups[target.group].failing
                if why:
                    failing[target.where] = None
                else:
                    del failing[target.where]
        if groups or (was_unknown and not self._unknown):
            self._pass([], groups)


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

