"""Follows all objects of one kind at an API server: everything that exists, then every change.

What client-go calls a reflector. State that was delivered stays while the
server is away. When a watch can't be resumed, everything is asked for again,
and what is missing then is reported as gone.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from kproxy_core.apiclient.access import AccessError
from kproxy_core.apiclient.lines import MAX_LINE, Lines
from kproxy_core.apiclient.requests import ApiRequests, HistoryLost, Refusal, refusal
from kproxy_core.apiclient.transport import ProtocolError
from kproxy_core.objects.decode import Malformed, Resource
from kproxy_core.objects.reading import Reading
from kproxy_core.sources.apiserver.trouble import Trouble
from kproxy_core.store.events import BadObject, Complete, Emit, Event
from kproxy_core.timing.backoff import STABLE, Backoff

log = logging.getLogger("kproxy.sources")

W = TypeVar("W", bound=msgspec.Struct)
V = TypeVar("V")
Name = tuple[str, str]
"""Namespace ("" for kinds that have none) and name."""

WATCH_SECONDS = 300
"""A watch is asked to last this long, up to twice as long by chance (as client-go's)."""

WATCH_SILENCE = 90.0
"""Seconds without a byte that are too much in a watch: once a minute there is a bookmark at least.

More is a server that hangs, or one that a load balancer in between lost sight of; another takes over.
"""

FIRST_PAGE = 500
"""Objects in the first page of a list."""

PAGE_BYTES = 4 << 20
"""What the pages after it aim at: objects differ in size by three orders of magnitude, memory does not."""


_NOT_ABOUT_THE_VERSION = (403, 404, 408, 429)
"""Of the statuses that blame the client: a server that just started knows neither roles nor all kinds."""


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


class Reflector(Generic[W, V]):
    """One thread's work: follows one kind and hands its events to *emit* until it is stopped.

    *trouble* is shared by all kinds. *clock*: monotonic seconds. *chance*: uniform in [0, 1).
    """

    def __init__(
        self, kind: Kind[W, V], requests: ApiRequests, emit: Emit, trouble: Trouble,
        clock: Callable[[], float], chance: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._requests = requests
        self._emit = emit
        self._trouble = trouble
        self._clock = clock
        self._chance = chance
        self._backoff = Backoff(chance)
        self._stopping = threading.Event()
        self._lists_by_watch = True
        """Unless that failed, until a list succeeds: watch-list (KEP-3157) is the quickest for all."""
        self._complete = False
        self._known: set[Name] = set()
        self._unseen: set[Name] | None = None
        """While everything is delivered anew: what was known and has not come up yet."""
        self._version = ""
        """Where the watch goes on; "": everything has to be asked for."""
        self._watching_since: float | None = None
        self._breaks = 0
        """Attempts that failed since one went well for a while."""
        self._answers = True
        """The server did so when it was asked last."""
        self._bookmarked = False
        """This server sends bookmarks."""
        self._silences = 0
        """Watches in a row that ended in silence."""

    def run(self) -> None:
        """Follow until `stop` is called."""
        while not self._stopping.is_set():
            self._watching_since = self._unseen = None
            delay = self._attempt()
            if delay:
                self._stopping.wait(delay)
        self._requests.disconnect()

    def stop(self) -> None:
        """Make `run` return soon, without another event. For another thread."""
        self._stopping.set()
        self._requests.abort()

    def _attempt(self) -> float:
        """Follow as long as it goes well. Seconds to wait before the next attempt."""
        resumed = bool(self._version)
        by_watch, asked = self._lists_by_watch and not resumed, 0.0
        problem: Exception | None = None
        self._renew_access(self._requests.keep_up)
        try:
            if not self._version and not by_watch:
                self._list()
                self._lists_by_watch = True
            self._watch()
        except HistoryLost as lost:
            self._list_again(str(lost))
            if resumed:
                return 0.0  # the server is there; only if it goes on like this, it is given time
        except Refusal as refused:
            problem, asked = refused, self._answer(refused)
        except (OSError, ProtocolError, Malformed) as error:
            problem, self._answers = error, False
            if resumed and self._watching_since is not None and isinstance(error, TimeoutError):
                self._was_silent()
            self._renew_access(partial(self._requests.renew, error))
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
        if lasted >= STABLE:
            self._breaks = 0
            if problem is None:
                return 0.0  # every watch ends some time
        delay = self._backoff.delay(lasted, asked)
        if problem is not None:
            self._requests.disconnect()
            self._breaks += 1
            text = str(problem) or type(problem).__name__
            if self._is_missing(problem):
                self._trouble.missing(self._kind.resource.plural, text)
            elif short or self._breaks > 1:
                # A watch that breaks once goes on at once; if something hinders it, that is said.
                self._trouble.met(self._kind.resource.plural, text, delay)
        return delay

    def _is_missing(self, problem: Exception) -> bool:
        """Whether this server, or our role there, has no such thing, which is fine if it never had."""
        return (self._kind.optional and not self._version
                and isinstance(problem, Refusal) and problem.code in (403, 404))

    def _answer(self, refused: Refusal) -> float:
        """What follows from being *refused*; the seconds to wait at least."""
        if not self._answers:
            self._backoff.hasten()
        self._answers = True
        if refused.code == 401:
            self._renew_access(partial(self._requests.renew, refused))
        elif self._is_missing(refused):
            self._deliver(self._completed())  # nobody waits for what may never come
        elif 400 <= refused.code < 500 and refused.code not in _NOT_ABOUT_THE_VERSION:
            self._version = ""  # perhaps that is what it did not like
        return refused.retry_after

    def _was_silent(self) -> None:
        """A watch that was granted was silent for too long.

        Of a history that was replaced by an older one, such as a backup of etcd, the server says nothing
        until it is as far again. A server that hangs grants no second watch.
        """
        self._silences += 1
        if self._bookmarked and self._silences > 1:
            self._list_again("a server that has sent bookmarks sends none since this version")

    def _list_again(self, reason: str) -> None:
        self._version, self._silences = "", 0
        log.info("listing again", extra=self._fields(reason=reason))

    def _renew_access(self, renew: Callable[[], None]) -> None:
        try:
            renew()
        except AccessError as error:
            self._trouble.met(self._kind.resource.plural, str(error), 0.0)

    # -- everything that exists

    def _list(self) -> None:
        """LIST, page by page."""
        self._unseen = self._known.copy()
        query: dict[str, str] = {}
        limit = FIRST_PAGE
        while self._unseen is not None:
            data = self._requests.list(self._target({"limit": str(limit)} | query), first=not query)
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
            query |= {"resourceVersion": self._version}
            response = self._requests.watch(self._target(query))
        else:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
            response = self._requests.watch(self._target(query))
            self._unseen = self._known.copy()
        self._watching_since = self._clock()
        self._trouble.over(self._kind.resource.plural)
        if self._version:
            self._requests.allow_silence(WATCH_SILENCE)
        lines = Lines()
        while data := response.read():
            self._silences = 0
            events: list[Event] = []
            listing = self._unseen is not None
            try:
                for line in lines.feed(data):
                    self._take(line, events)
                events += [self._bad_line(f"longer than {MAX_LINE} bytes")] * lines.take_too_long()
            finally:
                self._deliver(events)
            if listing and self._unseen is None:
                self._requests.allow_silence(WATCH_SILENCE)

    def _take(self, data: bytes, events: list[Event]) -> None:
        """Add to *events* what one line of a watch means. Raises HistoryLost, Refusal."""
        try:
            line = self._kind.resource.watch_line(data)
        except Malformed as error:
            events.append(self._bad_line(str(error)))
            return
        if line.status is not None:
            raise refusal(line.status)
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
            self._bookmarked |= line.type == "BOOKMARK"
            self._version = line.resource_version

    # -- what both have in common

    def _target(self, query: dict[str, str]) -> str:
        return f"{self._kind.path}?{urlencode(self._kind.selectors | query)}"

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

    def _fields(self, **fields: object) -> dict[str, object]:
        return {"fields": {"resource": self._kind.resource.plural} | fields}


def _lists_may_do_better(problem: Exception | None) -> bool:
    """Whether a watch-list that did not get to its end failed for a reason that a plain list has not."""
    if isinstance(problem, Refusal):
        return problem.code not in (401, 403, 404, 429, 503)
    return problem is None or isinstance(problem, TimeoutError)


def _is_older(version: str, than: str) -> bool:
    """Whether a resource version is older: only if the server's history was replaced (KEP-5504)."""
    return version.isdecimal() and than.isdecimal() and (len(version), version) < (len(than), than)
