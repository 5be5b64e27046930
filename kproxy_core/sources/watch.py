"""Follows all objects of one kind at an API server: everything that exists, then every change.

What client-go calls a reflector. State that was delivered stays while the
server is away. When a watch can't be resumed, everything is asked for again,
and what is missing then is reported as gone.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from kproxy_core.sources.access import AccessError, CurrentAccess
from kproxy_core.sources.backoff import STABLE, Backoff
from kproxy_core.sources.decode import UNDECODABLE, Malformed, Resource, Status
from kproxy_core.sources.events import BadObject, Complete, Emit, Event
from kproxy_core.sources.framing import MAX_LINE, Lines, ProtocolError
from kproxy_core.sources.http import Connection, Response
from kproxy_core.sources.reading import Reading, shown

log = logging.getLogger("kproxy.sources")

W = TypeVar("W", bound=msgspec.Struct)
V = TypeVar("V")
Name = tuple[str, str]
"""Namespace ("" for kinds that have none) and name."""

SILENCE = 60.0
"""Seconds without a byte that are too much, except in a watch that only waits for changes."""

WATCH_SECONDS = 300
"""A watch is asked to last this long, up to twice as long by chance (as client-go's)."""

FIRST_PAGE = 500
"""Objects in the first page of a list."""

PAGE_BYTES = 4 << 20
"""What the pages after it aim at: objects differ in size by three orders of magnitude, memory does not."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[W, V]):
    """What to follow, and what it means."""

    resource: Resource[W, V]
    selectors: dict[str, str]
    """labelSelector, fieldSelector."""
    present: Callable[[Name, V], Event | None]
    """What follows when an object was added or changed."""
    gone: Callable[[Name], Event | None]
    """What follows when an object is gone or of no use any more."""
    optional: bool = False
    """Older servers don't have it, and older roles may not read it."""

    @property
    def path(self) -> str:
        version = self.resource.api_version
        return f"/{'apis' if '/' in version else 'api'}/{version}/{self.resource.plural}"


class Refusal(Exception):
    """The server said no: with an HTTP status, or in the middle of a watch."""

    def __init__(self, status: Status, retry_after: float = 0.0) -> None:
        super().__init__(f"{status.code} {shown(status.reason or '')}: {shown(status.message or '', 200)}")
        self.code = status.code or 0
        self.retry_after = retry_after
        """Seconds that the server asks us to wait; 0: it does not say."""


class HistoryLost(Exception):
    """The watch can't go on from where it was; everything has to be asked for again."""


class Reflector(Generic[W, V]):
    """One thread's work: follows one kind and hands its events to *emit* until it is stopped.

    *clock*: monotonic seconds. *chance*: uniform in [0, 1).
    """

    def __init__(
        self, kind: Kind[W, V], access: CurrentAccess, emit: Emit,
        clock: Callable[[], float], chance: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._current_access = access
        self._emit = emit
        self._clock = clock
        self._chance = chance
        self._backoff = Backoff(chance)
        self._stopping = threading.Event()
        self._access = access.now
        self._connection = Connection(self._access)
        self._lists_by_watch = True
        """Until the server refuses: watch-list (KEP-3157) is the quickest for it and for us."""
        self._complete = False
        self._known: set[Name] = set()
        self._unseen: set[Name] | None = None
        """While everything is delivered anew: what was known and has not come up yet."""
        self._version = ""
        """Where the watch goes on; "": everything has to be asked for."""
        self._watching_since: float | None = None
        self._trouble = ""

    def run(self) -> None:
        """Follow until `stop` is called."""
        while not self._stopping.is_set():
            self._watching_since = self._unseen = None
            delay = self._attempt()
            if delay:
                self._stopping.wait(delay)
        self._connection.close()

    def stop(self) -> None:
        """Make `run` return soon, without another event. For another thread."""
        self._stopping.set()
        self._connection.abort()

    def _attempt(self) -> float:
        """Follow as long as it goes well. Seconds to wait before the next attempt."""
        by_watch, asked = self._lists_by_watch and not self._version, 0.0
        problem: Exception | None = None
        try:
            if not self._version and not by_watch:
                self._list()
            self._watch()
        except HistoryLost as lost:
            self._version = ""
            log.info("listing again", extra=self._fields(reason=str(lost)))
        except Refusal as refusal:
            problem, asked = refusal, self._answer(refusal)
        except (OSError, ProtocolError, Malformed) as error:
            problem = error
            if self._access.tls is not None and _is_about_tls(error):
                self._renew_access()
        except Exception as error:  # a thread that dies would leave the state stale for ever
            problem, self._version = error, ""
            log.exception("bug: %s", error, extra=self._fields())
        if self._stopping.is_set():
            return 0.0
        short = self._watching_since is None or self._unseen is not None
        if by_watch and short and _lists_may_do_better(problem):
            self._lists_by_watch = False
            return 0.0
        lasted = 0.0 if self._watching_since is None else self._clock() - self._watching_since
        if problem is None and lasted >= STABLE:
            return 0.0  # every watch ends some time
        delay = self._backoff.delay(lasted, asked)
        if problem is not None:
            self._connection.close()
            self._report(problem, delay)
        return delay

    def _answer(self, refusal: Refusal) -> float:
        """What follows from a *refusal*; the seconds to wait at least."""
        if refusal.code == 401:
            self._renew_access()
        elif refusal.code in (403, 404) and self._kind.optional:
            self._deliver(self._completed())  # nobody waits for what may never come
        elif 400 <= refusal.code < 500 and refusal.code != 429:
            self._version = ""  # perhaps that is what it did not like
        return refusal.retry_after

    # -- everything that exists

    def _list(self) -> None:
        """LIST, page by page."""
        self._unseen = self._known.copy()
        query: dict[str, str] = {}
        limit = FIRST_PAGE
        while self._unseen is not None:
            data = self._get({"limit": str(limit)} | query).read_all()
            page = self._kind.resource.page(data)
            events: list[Event] = []
            for reading in page.readings:
                self._present(reading, events)
            if not page.resource_version:
                raise Malformed("a list without metadata.resourceVersion")
            if not page.next_page:
                events += self._all_seen()
                self._version = page.resource_version
            self._deliver(events)
            query = {"continue": page.next_page}
            limit = max(50, min(limit * PAGE_BYTES // max(len(data), 1), 10_000))

    def _all_seen(self) -> list[Event]:
        """Everything that exists has come up: what follows for the rest of what was known."""
        events: list[Event] = []
        for name in self._unseen or ():
            self._gone(name, events)
        self._unseen = None
        return events + self._completed()

    def _completed(self) -> list[Event]:
        """What to announce, the first time that everything which exists was delivered."""
        if self._complete:
            return []
        self._complete = True
        return [Complete(self._kind.resource.plural)]

    # -- every change

    def _watch(self) -> None:
        """WATCH, and first everything that exists if there is no version to start from."""
        seconds = int(WATCH_SECONDS * (1 + self._chance()))
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        if self._version:
            response = self._get(query | {"resourceVersion": self._version})
        else:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
            response = self._get(query)
            self._unseen = self._known.copy()
        self._watching_since = self._clock()
        self._report_success()
        if self._version:
            self._connection.set_timeout(seconds + SILENCE)
        lines = Lines()
        while data := response.read():
            events: list[Event] = []
            listing = self._unseen is not None
            try:
                for line in lines.feed(data):
                    self._take(line, events)
                events += [self._bad_line(f"longer than {MAX_LINE} bytes")] * lines.take_too_long()
            finally:
                self._deliver(events)
            if listing and self._unseen is None:
                self._connection.set_timeout(seconds + SILENCE)

    def _take(self, data: bytes, events: list[Event]) -> None:
        """Add to *events* what one line of a watch means. Raises HistoryLost, Refusal."""
        try:
            line = self._kind.resource.watch_line(data)
        except Malformed as error:
            events.append(self._bad_line(str(error)))
            return
        if line.status is not None:
            raise _refusal(line.status)
        if _is_older(line.resource_version, self._version):
            raise HistoryLost(f"resource version {line.resource_version} after {self._version}")
        if line.reading is not None:
            if line.type in ("ADDED", "MODIFIED"):
                self._present(line.reading, events)
            elif line.type == "DELETED" and line.reading.name is not None:
                self._gone(line.reading.name, events)
        if self._unseen is not None:
            # In no order: only the bookmark after the last one is a version to go on from.
            if line.initial_events_end:
                events += self._all_seen()
                self._version = line.resource_version
        elif line.resource_version:
            self._version = line.resource_version

    # -- what both have in common

    def _get(self, query: dict[str, str]) -> Response:
        """The response to a request that was granted. Raises Refusal, HistoryLost, OSError, ProtocolError."""
        target = f"{self._kind.path}?{urlencode(self._kind.selectors | query)}"
        response = self._connection.get(target, SILENCE)
        if response.status == 200:
            return response
        try:
            status = _decode_status(response.read_all())
        except UNDECODABLE:
            status = Status()
        after = response.headers.get("retry-after", "")
        raise _refusal(Status(response.status, status.reason, status.message),
                       float(after) if after.isascii() and after.isdigit() else 0.0)

    def _present(self, reading: Reading[V], events: list[Event]) -> None:
        """An object was added or changed."""
        name = reading.name
        if name is not None:
            self._known.add(name)
            if self._unseen is not None:
                self._unseen.discard(name)
            event = (self._kind.gone(name) if reading.value is None
                     else self._kind.present(name, reading.value))
            if event is not None:
                events.append(event)
        if reading.bad:
            events.extend(reading.bad)

    def _gone(self, name: Name, events: list[Event]) -> None:
        self._known.discard(name)
        event = self._kind.gone(name)
        if event is not None:
            events.append(event)

    def _bad_line(self, problem: str) -> BadObject:
        return BadObject(self._kind.resource.kind, "(in a watch)", "", problem)

    def _deliver(self, events: list[Event]) -> None:
        if events and not self._stopping.is_set():
            self._emit(events)

    def _renew_access(self) -> None:
        """Go on with the credentials that are in the files now."""
        try:
            self._current_access.renew(self._access)
        except AccessError as error:
            log.warning("can't renew the access to the API server", extra=self._fields(problem=str(error)))
            return
        self._access = self._current_access.now
        self._connection.close()
        self._connection = Connection(self._access)
        if self._stopping.is_set():
            self._connection.abort()

    def _report(self, problem: Exception, delay: float) -> None:
        """Say once that something is wrong, until it changes or is over."""
        text = str(problem) or type(problem).__name__
        if text != self._trouble:
            self._trouble = text
            log.warning("can't follow the API server",
                        extra=self._fields(problem=text, retry_in=round(delay, 1)))

    def _report_success(self) -> None:
        if self._trouble:
            self._trouble = ""
            log.info("following the API server again", extra=self._fields())

    def _fields(self, **fields: object) -> dict[str, object]:
        return {"fields": {"resource": self._kind.resource.plural} | fields}


_decode_status = msgspec.json.Decoder(Status).decode


def _refusal(status: Status, retry_after: float = 0.0) -> Exception:
    """The exception that a failure is: 410 stands for a version, or a list, that is too old."""
    if status.code == 410:
        return HistoryLost(shown(status.message or status.reason or "410 Gone", 200))
    return Refusal(status, retry_after)


def _lists_may_do_better(problem: Exception | None) -> bool:
    """Whether a watch-list that did not get to its end failed for a reason that a plain list has not."""
    if isinstance(problem, Refusal):
        return problem.code not in (401, 403, 404, 429, 503)
    return problem is None or isinstance(problem, TimeoutError)


def _is_older(version: str, than: str) -> bool:
    """Whether a resource version is older: only if the server's history was replaced (KEP-5504)."""
    return version.isdecimal() and than.isdecimal() and (len(version), version) < (len(than), than)


def _is_about_tls(error: Exception) -> bool:
    from ssl import SSLError
    return isinstance(error, SSLError) or isinstance(error.__cause__, SSLError)
