"""All objects of the kinds that a proxy needs, followed at an API server: everything that exists, then
every change.
"""

import enum
import logging
import random
import threading
import time
from collections.abc import Callable, Set
from functools import partial
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct

from kproxy_core.kube.access import AccessError, CurrentAccess
from kproxy_core.kube.decode import (
    ENDPOINT_SLICES,
    NODES,
    SERVICE_CIDRS,
    SERVICES,
    Decoder,
    Malformed,
    Name,
    Resource,
)
from kproxy_core.kube.reading import Reading
from kproxy_core.kube.requests import ApiRequests, Observe, ResourceExpired, StatusError, status_error
from kproxy_core.kube.transport import (
    LIMITS,
    MAX_LINE,
    PROTOBUF_OR_JSON,
    Frames,
    Limits,
    Lines,
    ProtocolError,
    ResponseTooLarge,
)
from kproxy_core.model.events import BadObject, Complete, Emit, Event, limit_complaints
from kproxy_core.model.timing import STABLE, Backoff, TokenBucket

log = logging.getLogger("kproxy.sources")

_PER_OBJECT = 1 << 10
"""Bytes added to the encoding of each object: a small one takes more in memory."""

WATCH_SECONDS = 300
"""Minimum duration of a watch in seconds; up to twice as long by chance (as client-go's)."""

FIRST_PAGE = 500
"""Objects in the first page of a list."""

PAGE_BYTES = 4 << 20
"""Target size in bytes of the pages after it: objects differ in size by three orders of magnitude."""

FIRST_BATCH = 10_000
"""Events of the first list that are delivered at a time. Nothing is served until it has ended, and each batch
wakes the loop, which then contends for the interpreter with the threads that receive."""

RELIST_SPREAD = 1.0
"""Seconds over which the nodes of a cluster spread their relists after their server lost the history: all
watches of a server that restarts break at once."""

FILE_CHECK = 1.0
"""Interval in seconds between checks of the configuration's files while the next attempt has to wait."""

STOP_SECONDS = 2.0
"""Timeout in seconds for ending all threads. A thread that still resolves a name or loads credentials is
abandoned, and emits nothing."""

_MOST_REMEMBERED = 50

_NOT_ABOUT_THE_VERSION = (403, 404, 408, 429)
"""Statuses that blame the client, not its version: a starting server knows neither roles nor all kinds."""


class ProblemLog:
    """Logs each problem with the API server once, however many threads meet it. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, set[str]] = {}
        """Problems of each resource since it was last followed."""
        self._not_served: set[str] = set()

    def failed(self, resource: str, problem: str, retry_in: float) -> None:
        """Log *problem*, because of which *resource* is followed only after *retry_in* seconds."""
        with self._lock:
            known = any(problem in problems for problems in self._problems.values())
            problems = self._problems.setdefault(resource, set())
            if not known and len(problems) >= _MOST_REMEMBERED:
                problems.clear()
            problems.add(problem)
        if not known:
            log.warning("cannot follow the API server", extra={"fields": {
                "resource": resource, "problem": problem, "retry_in": round(retry_in, 1)}})

    def not_served(self, resource: str, answer: str) -> None:
        """Log that the server does not serve *resource*, which is optional."""
        with self._lock:
            known = resource in self._not_served
            self._not_served.add(resource)
        if not known:
            log.info("optional resource not served by the API server",
                     extra={"fields": {"resource": resource, "answer": answer}})

    def recovered(self, resource: str) -> None:
        """Log that the server is followed again, once all resources are."""
        with self._lock:
            self._not_served.discard(resource)
            last = self._problems.pop(resource, None) is not None and not self._problems
        if last:
            log.info("following the API server again")


class ServerState(Struct):
    """The state of the server as observed by the requests for one kind."""

    answers: bool = True
    """The last request was answered, if only with a refusal."""
    failures: int = 0
    """Failed attempts since one worked for a while."""
    announces_progress: bool = False
    """The server sent a bookmark with a version newer than that of the last object.

    With etcd 3.4, which does not report its progress, the bookmarks of an API server repeat the version
    of the last object, and a watch resumed from that version gets none.
    """
    silences: int = 0
    """Consecutive watches that were granted and ended in silence."""

    @property
    def hides_history(self) -> bool:
        """Return whether the silences mean that an older history replaced the server's.

        With such a history, for example from a backup of etcd, a watch is silent until the history reaches
        the version asked for. A server that hangs grants no second watch. A server that has never announced
        progress may just have no events.
        """
        return self.announces_progress and self.silences > 1

    def forget_history(self) -> None:
        """Reset the silence heuristic before a relist, whose server may not announce progress."""
        self.silences = 0
        self.announces_progress = False


class ReplicaTooLarge(Exception):
    """The objects of one kind exceed `Limits.most_held`."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"objects of more than {limit} bytes")


class Replica:
    """Names and sizes of the delivered objects of one kind, and the events that keep the store equal to the
    server.

    During a relist it also knows the objects that have not been listed yet: those left at the end of the list
    were deleted.
    """

    def __init__(self, resource: Resource[Any, Any], most_held: int) -> None:
        self._resource = resource
        self._most_held = most_held
        self._known: dict[Name, int] = {}
        """Size of each object in bytes, with `_PER_OBJECT`."""
        self._held = 0
        """The sum of them."""
        self._limit = self._most_held
        self._unseen: set[Name] | None = None
        """Objects not listed yet; None: no listing is under way."""
        self.problems: dict[Name, tuple[BadObject, ...]] = {}
        """Those of objects that are not used, or only in part."""
        self._unproven: set[Name] = set()
        """Objects that were new in listings since the last one that ended."""
        self.is_complete = False
        """Everything has been listed once, or the server does not serve this kind."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def is_listing(self) -> bool:
        return self._unseen is not None

    def start_listing(self) -> None:
        self._unseen = set(self._known)
        # The former objects are held until all others are known, as many as there may be.
        self._limit = self._most_held + self._held - self._size(self._unproven)

    def abandon_listing(self) -> None:
        """Keep everything: objects that were not listed may still exist."""
        self._unseen = None
        self._limit = self._most_held

    def set(self, reading: Reading[Any], size: int, events: list[Event]) -> None:
        """Append to *events* those for an object encoded in *size* bytes. Raises ReplicaTooLarge."""
        name = reading.name
        if name is not None:
            counted = size + _PER_OBJECT
            known = self._known.get(name)
            held = self._held + counted - (known or 0)
            if held > max(self._held, self._limit):
                raise ReplicaTooLarge(self._most_held)
            self._held, self._known[name] = held, counted
            if self._unseen is not None:
                self._unseen.discard(name)
                if known is None:
                    self._unproven.add(name)
            events.append(self._resource.gone(name) if reading.value is None else reading.value)
            if reading.bad:
                self.problems[name] = tuple(reading.bad)
            else:
                self.problems.pop(name, None)
        events += reading.bad

    def delete(self, name: Name) -> list[Event]:
        self._held -= self._known.pop(name, 0)
        self.problems.pop(name, None)
        self._unproven.discard(name)
        return [self._resource.gone(name)]

    def end_listing(self) -> list[Event]:
        """Return the events for the objects that were not listed, and the first time `Complete`.

        Raises ReplicaTooLarge.
        """
        unseen = self._unseen or set()
        if self._held - self._size(unseen) > self._most_held:
            raise ReplicaTooLarge(self._most_held)
        events = [event for name in unseen for event in self.delete(name)]
        self._unseen = None
        self._unproven.clear()
        self._limit = self._most_held
        return events + self.complete()

    def drop_unproven(self) -> list[Event]:
        """Return the events that delete the objects added by a listing that was too large."""
        return [event for name in list(self._unproven) for event in self.delete(name)]

    def complete(self) -> list[Event]:
        """Return `Complete`, the first time."""
        if self.is_complete:
            return []
        self.is_complete = True
        return [Complete(self._resource.plural)]

    def _size(self, names: Set[Name]) -> int:
        return sum(self._known[name] for name in names)


class Start(enum.Enum):
    """The first request of an attempt.

    If the server has lost the version of a RESUME, WATCH_LIST follows. A LIST follows a watch-list that
    failed in a way in which a plain list may not, and RESUME follows a list.
    """

    WATCH_LIST = enum.auto()
    """A watch that first delivers everything that exists (KEP-3157): the cheapest way for the server."""
    LIST = enum.auto()
    """A list, page by page, and then a watch."""
    RESUME = enum.auto()
    """A watch of the changes after a version."""


class WatchPhase(enum.Enum):
    """The progress of an attempt."""

    ASKING = enum.auto()
    """No watch was granted yet."""
    LISTING = enum.auto()
    """A watch delivers everything that exists."""
    FOLLOWING = enum.auto()
    """A watch delivers changes."""


class Reflector:
    """Follows all objects of one kind at an API server: everything that exists, then every change.

    The counterpart of client-go's reflector, run by one thread. While the server is away, the delivered state
    is kept. When a watch can't be resumed, everything is listed again, and objects that are missing then are
    reported as deleted.

    *selectors*: labelSelector and fieldSelector. *emit* takes the events. *problems* is shared by all kinds.
    *chance*: uniform in [0, 1).
    """

    def __init__(
        self, resource: Resource[Any, Any], selectors: dict[str, str], requests: ApiRequests, emit: Emit,
        problems: ProblemLog, chance: Callable[[], float], limits: Limits = LIMITS,
        backoff: type[Backoff] = Backoff,
    ) -> None:
        self._resource = resource
        self._selectors = selectors
        self._requests = requests
        self._emit = emit
        self._problems = problems
        self._chance = chance
        self._backoff = backoff(chance)
        self._stopping = threading.Event()
        self._most_listed = limits.largest_list
        self._replica = Replica(resource, limits.most_held)
        self._server = ServerState()
        self._start = Start.WATCH_LIST
        self._version = ""
        """The version to resume after; "" unless the start is RESUME."""
        self._granted: float | None = None
        """Time at which this attempt's watch was granted (monotonic seconds)."""
        self._page = FIRST_PAGE

    def run(self) -> None:
        """Follow until `stop` is called."""
        while not self._stopping.is_set():
            self._granted = None
            self._replica.abandon_listing()
            self._wait(self._attempt())
        self._requests.disconnect()

    def finds_nothing(self, resource: Resource[Any, Any]) -> bool:
        """Return whether it follows *resource*, and no object exists. For another thread."""
        return self._resource is resource and self._replica.is_complete and not len(self._replica)

    def problems(self) -> list[BadObject]:
        """Return what is wrong with objects. For another thread."""
        return [bad for of_object in list(self._replica.problems.values()) for bad in of_object]

    def stop(self) -> None:
        """Make `run` return soon, without another event. For another thread."""
        self._stopping.set()
        self._requests.abort()

    def _wait(self, seconds: float) -> None:
        """Wait before the next attempt, but no longer than until a file with credentials is replaced."""
        while seconds > 0 and not self._requests.files_replaced():
            if self._stopping.wait(min(seconds, FILE_CHECK)):
                return
            seconds -= FILE_CHECK

    # -- states

    @property
    def _phase(self) -> WatchPhase:
        if self._granted is None:
            return WatchPhase.ASKING
        return WatchPhase.LISTING if self._replica.is_listing else WatchPhase.FOLLOWING

    def _resume_after(self, version: str) -> None:
        self._start, self._version = Start.RESUME, version

    def _list_again(self) -> None:
        """List everything in the next attempt, in the way that worked last."""
        if self._start is Start.RESUME:
            self._start, self._version = Start.WATCH_LIST, ""

    # -- attempts

    def _attempt(self) -> float:
        """Follow as long as it works. Return the seconds to wait before the next attempt."""
        start, asked = self._start, 0.0
        problem: Exception | None = None
        self._renew_access(self._requests.keep_up)
        try:
            if start is Start.LIST:
                self._list()
            self._watch()
        except ResourceExpired as lost:
            self._lose_history(str(lost))
            if start is Start.RESUME:  # The server answers. If it loses the next list too, that one waits.
                return RELIST_SPREAD * self._chance()
        except StatusError as refused:
            problem, asked = refused, self._take_refusal(refused)
        except (OSError, ProtocolError, Malformed, ReplicaTooLarge) as error:
            problem = error
            self._take_failure(error, start)
        except Exception as error:  # a thread that dies would leave the state stale for ever
            problem = error
            self._list_again()
            log.exception("bug: %s", error, extra=self._fields())
        if self._stopping.is_set():
            return 0.0
        following = self._phase is WatchPhase.FOLLOWING
        if start is Start.WATCH_LIST and not following and _lists_may_do_better(problem):
            self._start = Start.LIST
            return 0.0
        lasted = time.monotonic() - self._granted if following and self._granted is not None else 0.0
        if lasted >= STABLE:
            self._server.failures = 0
            if problem is None:
                return 0.0  # every watch ends some time
        delay = self._backoff.delay(lasted, asked)
        if problem is not None:
            self._report(problem, delay, following)
        return delay

    def _report(self, problem: Exception, delay: float, following: bool) -> None:
        """Log *problem*, but not a watch that broke once: it is resumed at once, or fails with a reason."""
        self._requests.disconnect()
        self._server.failures += 1
        text = str(problem) or type(problem).__name__
        if self._is_missing(problem):
            self._problems.not_served(self._resource.plural, text)
        elif not following or self._server.failures > 1:
            self._problems.failed(self._resource.plural, text, delay)

    def _take_refusal(self, refused: StatusError) -> float:
        """Prepare the next attempt after *refused*. Return the seconds that the server asks to wait."""
        if not self._server.answers:
            self._backoff.hasten()
        self._server.answers = True
        if refused.code == 401:
            self._renew_access(partial(self._requests.renew, refused))
        elif self._is_missing(refused):
            self._deliver(self._replica.complete())  # nothing has to wait for what may never be served
        elif 400 <= refused.code < 500 and refused.code not in _NOT_ABOUT_THE_VERSION:
            self._list_again()
        return refused.retry_after

    def _take_failure(self, error: Exception, start: Start) -> None:
        """Prepare the next attempt after *error*, which is no answer."""
        self._server.answers = False
        if isinstance(error, ResponseTooLarge):
            self._page = max(1, self._page // 8)
        if isinstance(error, ReplicaTooLarge):
            self._deliver(self._replica.drop_unproven())
        if start is Start.RESUME and self._granted is not None and isinstance(error, TimeoutError):
            self._server.silences += 1
            if self._server.hides_history:
                self._lose_history("a server that announced newer versions announces none since this one")
        self._renew_access(partial(self._requests.renew, error))

    def _is_missing(self, problem: Exception) -> bool:
        """Return whether *problem* says that an optional kind is not served, or not to us, and never was."""
        return (self._resource.optional and self._start is not Start.RESUME
                and isinstance(problem, StatusError) and problem.code in (403, 404))

    def _lose_history(self, reason: str) -> None:
        self._list_again()
        self._server.forget_history()
        log.info("listing again", extra=self._fields(reason=reason))

    def _renew_access(self, renew: Callable[[], None]) -> None:
        try:
            renew()
        except AccessError as error:
            self._problems.failed(self._resource.plural, str(error), 0.0)

    # -- requests

    def _list(self) -> None:
        self._replica.start_listing()
        query: dict[str, str] = {}
        limit, received = self._page, 0
        while self._replica.is_listing:
            data, is_protobuf = self._requests.list(
                self._target({"limit": str(limit)} | query), first=not query)
            received += len(data)
            self._check_length(received)
            page = self._decoder(is_protobuf).page(data)
            if not page.resource_version:
                raise Malformed("a list without metadata.resourceVersion")
            events: list[Event] = []
            each = len(data) // max(len(page.readings), 1)
            for reading in page.readings:
                self._replica.set(reading, each, events)
            if not page.next_page:
                events += self._replica.end_listing()
                self._resume_after(page.resource_version)
            self._deliver(events)
            query = {"continue": page.next_page}
            limit = max(min(50, self._page), min(limit * PAGE_BYTES // max(len(data), 1), 10_000))

    def _watch(self) -> None:
        """WATCH, and first everything that exists unless there is a version to resume after."""
        seconds = int(WATCH_SECONDS * (1 + self._chance()))
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        if self._start is Start.RESUME:
            query |= {"resourceVersion": self._version}
        else:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        response = self._requests.watch(self._target(query))
        if self._start is Start.RESUME:
            self._problems.recovered(self._resource.plural)
        else:
            self._replica.start_listing()
        self._granted = time.monotonic()
        decoder = self._decoder(response.is_protobuf)
        stream = Frames() if response.is_protobuf else Lines()
        events: list[Event] = []
        received = 0
        try:
            while True:
                if self._phase is WatchPhase.FOLLOWING:
                    self._requests.allow_endless_watch()
                data = response.read()
                if not data:
                    return
                if self._replica.is_listing:
                    received += len(data)
                    self._check_length(received)
                self._server.silences = 0
                for encoded in stream.feed(data):
                    if encoded is None:
                        events.append(self._bad_event(f"longer than {MAX_LINE} bytes"))
                    else:
                        self._take_event(decoder, encoded, events)
                if self._replica.is_complete or len(events) >= FIRST_BATCH:
                    batch, events = events, []
                    self._deliver(batch)
        finally:
            self._deliver(events)

    def _check_length(self, received: int) -> None:
        """Raise Malformed if a list does not end."""
        if received > self._most_listed:
            raise Malformed(f"a list of more than {self._most_listed} bytes")

    def _decoder(self, is_protobuf: bool) -> Decoder[Any]:
        if not is_protobuf:
            return self._resource
        from kproxy_core.kube.protobuf import ProtobufDecoder  # takes time and memory

        return ProtobufDecoder(self._resource)

    def _take_event(self, decoder: Decoder[Any], data: bytes, events: list[Event]) -> None:
        """Append the events of the watch event *data*.

        Raises ResourceExpired, StatusError, ReplicaTooLarge.
        """
        try:
            seen = decoder.watch_event(data)
        except Malformed as error:
            events.append(self._bad_event(str(error)))
            return
        if seen.status is not None:
            raise status_error(seen.status)
        if self._version and _is_older(seen.resource_version, self._version):
            raise ResourceExpired(f"resource version {seen.resource_version} after {self._version}")
        if seen.reading is not None:
            if seen.type in ("ADDED", "MODIFIED"):
                self._replica.set(seen.reading, len(data), events)
            elif seen.type == "DELETED" and seen.reading.name is not None:
                events += self._replica.delete(seen.reading.name)
        if self._replica.is_listing:
            # Listed in no order: only the bookmark after the last object is a version to resume after.
            if seen.initial_events_end:
                events += self._replica.end_listing()
                self._problems.recovered(self._resource.plural)
                self._resume_after(seen.resource_version)
        elif seen.resource_version:
            if seen.type == "BOOKMARK" and seen.resource_version != self._version:
                self._server.announces_progress = True
            self._resume_after(seen.resource_version)

    def _target(self, query: dict[str, str]) -> str:
        return f"{self._resource.path}?{urlencode(self._selectors | query)}"

    def _bad_event(self, problem: str) -> BadObject:
        return BadObject(self._resource.kind, "(in a watch)", "", problem)

    def _deliver(self, events: list[Event]) -> None:
        if events and not self._stopping.is_set():
            self._emit(limit_complaints(events, self._resource.kind, "(from the API server)"))

    def _fields(self, **fields: object) -> dict[str, object]:
        return {"fields": {"resource": self._resource.plural} | fields}


def _lists_may_do_better(problem: Exception | None) -> bool:
    """Return whether a plain list may succeed where a watch-list failed with *problem* before its end."""
    if isinstance(problem, StatusError):
        return problem.code not in (401, 403, 404, 429, 503)
    return problem is None or isinstance(problem, TimeoutError)


def _is_older(version: str, than: str) -> bool:
    """Return whether *version* is older: only if the server's history was replaced (KEP-5504)."""
    return version.isdecimal() and than.isdecimal() and (len(version), version) < (len(than), than)


class KubernetesSource:
    """Follows Services, EndpointSlices, this Node and the ServiceCIDRs of a Kubernetes API server.

    A `kproxy_core.model.events.Source` that asks for the same objects as kube-proxy 1.36
    (cmd/kube-proxy/app/server.go), each kind in a thread and on a connection of its own.

    *accept*: the Accept header of its requests. *qps* and *burst* limit requests as clientConnection's do; a
    *qps* of 0 or less sets no limit. *observe* is called for each request. *chance*: uniform in [0, 1).
    *backoff* delays the attempts of each kind.

    Unchanged objects are not asked for again: kube-proxy's configSyncPeriod only replays its memory.

    Raises AccessError.
    """

    kinds = tuple(resource.plural for resource in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))

    def __init__(
        self, access: CurrentAccess, node_name: str, *,
        accept: str = PROTOBUF_OR_JSON, qps: float = 5.0, burst: int = 10,
        observe: Observe = lambda request: None, chance: Callable[[], float] = random.random,
        limits: Limits = LIMITS, backoff: type[Backoff] = Backoff,
    ) -> None:
        access.keep_up()
        self._access = access
        self._rate = TokenBucket(1 / qps if qps > 0 else 0.0, burst)
        self._observe = observe
        self._accept = accept
        self._problems = ProblemLog()
        self._node_name = node_name
        self._chance = chance
        self._limits = limits
        self._backoff = backoff
        self._reflectors: list[Reflector] = []
        self._threads: list[threading.Thread] = []

    def start(self, emit: Emit) -> None:
        for resource, selectors in _selectors(self._node_name):
            requests = ApiRequests(self._access, self._rate, self._observe, self._accept, self._limits)
            reflector = Reflector(resource, selectors, requests, emit, self._problems, self._chance,
                                  self._limits, self._backoff)
            thread = threading.Thread(target=reflector.run, name=f"watch {resource.plural}", daemon=True)
            self._reflectors.append(reflector)
            self._threads.append(thread)
            thread.start()

    def problems(self) -> list[BadObject]:
        return [*(bad for reflector in self._reflectors for bad in reflector.problems()),
                *(BadObject(NODES.kind, self._node_name, "", "there is no such Node")
                  for reflector in self._reflectors if reflector.finds_nothing(NODES))]

    def stop(self) -> None:
        """Close the connections and stop delivering. No event follows once this returns."""
        for reflector in self._reflectors:
            reflector.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _selectors(node_name: str) -> tuple[tuple[Resource[Any, Any], dict[str, str]], ...]:
    """Return the resources to follow, each with its labelSelector and fieldSelector."""
    return (
        # The largest first: the server works on it while we start the others.
        # Slices may belong to no Service (KEP-6116): kube-proxy 1.36 asks for them, and does not use them.
        (ENDPOINT_SLICES, {"labelSelector": "!service.kubernetes.io/headless,kubernetes.io/service-name"}),
        (SERVICES, {"labelSelector": "!service.kubernetes.io/service-proxy-name",
                    "fieldSelector": "spec.clusterIP!=None"}),
        (NODES, {"fieldSelector": f"metadata.name={node_name}"}),
        (SERVICE_CIDRS, {}),
    )
