"""Quarantine of silent endpoints: follows connections, and has plans made without the endpoints in it."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kproxy_core.contract.values import Measurement
from kproxy_core.linux.conntrack import TcpFlow, read_answered_by, read_answered_by_one, read_unanswered_to
from kproxy_core.linux.conntrack_events import ResetWatch
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, format_socket
from kproxy_core.model.service import Destination, ServiceName, ServicePortKey
from kproxy_core.plan.quarantine import RECENT, Answer, Answers, Attempt, Judge, Quarantined
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.difference import Step
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

_MOST_ATTEMPTS = 1000
"""Waiting attempts that are read at a time; more tell nothing new."""
_MOST_ANSWERS = 5000
"""Answered connections of one endpoint that are read at a time."""
_MOST_OF_ANY = 2000
"""Answered connections of any endpoints that are read at a time."""
_EACH = 1.0
"""Seconds between looks while there is nothing to follow."""
_REST_SHARE = 60
"""Rest this many times the CPU time of the looks before, which costs less than 2 % of a processor. Looks at
answers are few, and not paced."""


class WatchedEndpoints:
    """The endpoints of TCP service ports that avoid silent ones. Any thread may look up."""

    def __init__(self) -> None:
        self._services: dict[Destination, tuple[ServiceName, ...]] = {}
        """A Service once for each of its ports."""
        self.local: Counter[Address] = Counter()
        """Addresses of endpoints on this node."""

    def __bool__(self) -> bool:
        return bool(self._services)

    def __contains__(self, where: object) -> bool:
        return where in self._services

    def services(self, where: Destination) -> Collection[ServiceName]:
        return frozenset(self._services.get(where, ()))

    def follow(self, key: ServicePortKey, before: ServicePlan | None, after: ServicePlan | None) -> None:
        """Take in the change of a service port."""
        name = key.service
        if after is not None and after.avoids_silent:
            for where in _endpoints(after):
                self._services[where] = (*self._services.get(where, ()), name)
            self.local.update(after.hairpins)
        if before is not None and before.avoids_silent:
            for where in _endpoints(before):
                services = self._services[where]
                at = services.index(name)
                self._services[where] = services[:at] + services[at + 1:]
                if not self._services[where]:
                    del self._services[where]
            self.local.subtract(before.hairpins)
            for address in before.hairpins:
                if not self.local[address]:
                    del self.local[address]


def _endpoints(plan: ServicePlan) -> tuple[Destination, ...]:
    """Return the endpoints of *plan* that may be put into quarantine: never the only one."""
    found = (*plan.reachable, *(where for where, _ in plan.quarantined))
    return found if len(found) > 1 else ()


def _attempt(flow: TcpFlow) -> Attempt:
    return Attempt(flow.id, flow.client, flow.endpoint)


def _answers(flows: Sequence[TcpFlow], most: int) -> Answers:
    return Answers([Answer(flow.id, flow.endpoint) for flow in flows], complete=len(flows) < most)


Apply = Callable[[Quarantined, Collection[ServiceName]], None]
Report = Callable[[ServiceName, str], None]


class EndpointHealth(SyncObserver):
    """Puts endpoints into quarantine that answer no new connections of this node.

    A thread, started with the first endpoint to watch, reads which connections wait for an answer.
    """

    def __init__(
        self, apply: Apply, report: Report, *, count_refusals: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both functions are called on the thread. *apply* has Services planned without the given endpoints;
        *report* is told what happened to an endpoint of a Service.

        *count_refusals*: an attempt that was refused counts like one without an answer. *clock*: monotonic
        seconds.
        """
        self._count_refusals = count_refusals
        self._apply = apply
        self._report = report
        self._clock = clock
        self._watched = WatchedEndpoints()
        self._judge = Judge()
        self._applied: Quarantined = {}
        self._sentences: Quarantined = {}
        """The endpoints in quarantine, also those on trial."""
        self._sentenced = 0
        self._refused: deque[tuple[float, Attempt]] = deque(maxlen=_MOST_ATTEMPTS)
        self._resets: ResetWatch | None = None
        self._cost = 0.0
        """CPU seconds of reading attempts since the last long rest."""
        self._problem = ""
        self._wakeup = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def sync_succeeded(self, synced: Synced) -> None:
        self.follow(synced.steps)
        if self._watched:
            self._wakeup.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kproxy-endpoints", daemon=True)
                self._thread.start()

    def follow(self, steps: Iterable[Step]) -> None:
        """Watch what the plans after *steps* ask for."""
        for step in steps:
            self._watched.follow(*step)

    def stop(self) -> None:
        self._stopped.set()
        self._wakeup.set()
        if self._resets is not None:
            self._resets.close()

    def measure(self) -> tuple[Measurement, ...]:
        return (
            Measurement("kproxy_quarantined_endpoints", "Endpoints in quarantine on this node", "gauge",
                        len(self._sentences)),
            Measurement("kproxy_quarantines_total", "Times that an endpoint was put into quarantine",
                        "counter", self._sentenced),
        )  # fmt: skip

    def _run(self) -> None:
        while self._wakeup.wait() and not self._stopped.is_set():
            self._wakeup.clear()
            if self._watched or self._sentences:
                self._wakeup.set()
            try:
                self.look()
                self._problem = ""
            except HostError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    log.warning("silent endpoints are not found", extra={"fields": {"error": self._problem}})
            self._rest()

    def _rest(self) -> None:
        """Wait until the next look is due. If a trial ends before, end it."""
        now = self._clock()
        rest, look_at = max(_EACH, _REST_SHARE * self._cost), self._judge.next_look(now)
        if look_at is None or look_at >= now + rest:
            look_at, self._cost = now + rest, 0.0
        ends_at = self._judge.next_end(now)
        if ends_at is not None and ends_at < look_at:
            self._stopped.wait(ends_at - now)
            self._follow()
        self._stopped.wait(max(0.0, look_at - self._clock()))

    def look(self) -> None:
        """Look once; the thread does so again and again. Raises HostError."""
        judge = self._judge
        if self._count_refusals and self._resets is None:
            self._resets = ResetWatch("conntrack-refusals", self._note_refused)
        started = time.thread_time()
        attempts = list(map(_attempt, read_unanswered_to(self._watched, _MOST_ATTEMPTS)))
        self._cost += time.thread_time() - started
        now = self._clock()
        attempts += [one for at, one in tuple(self._refused) if at > now - RECENT]
        wanted = judge.look(now, attempts, self._watched)
        if wanted.endpoints:
            answers = {where: _answers(read_answered_by_one(where, _MOST_ANSWERS), _MOST_ANSWERS)
                       for where in wanted.endpoints}
            of_any = _answers(read_answered_by(self._watched, _MOST_OF_ANY), _MOST_OF_ANY) \
                if wanted.of_any else None
            judge.hear(self._clock(), answers, of_any, self._watched.local)
        self._follow()
        self._tell(judge.sentences, self._clock())

    def _follow(self) -> None:
        """Have Services planned as the judge has decided."""
        quarantined = self._judge.quarantined(self._clock())
        if changed := quarantined.keys() ^ self._applied.keys():
            self._applied = quarantined
            self._apply(quarantined, {name for where in changed for name in self._watched.services(where)})

    def _note_refused(self, ended: Sequence[TcpFlow], _lost: bool) -> None:
        """Take connections that a reset has ended. One that was established before was not refused."""
        now = self._clock()
        self._refused.extend(
            (now, _attempt(flow)) for flow in ended if flow.endpoint in self._watched and not flow.is_assured)

    def _tell(self, sentences: Quarantined, now: float) -> None:
        before, self._sentences = self._sentences, sentences
        for where in sentences.keys() - before.keys():
            self._sentenced += 1
            services, number = self._watched.services(where), sentences[where].attempts
            log.warning("endpoint put into quarantine", extra={"fields": {
                "endpoint": format_socket(*where), "services": ",".join(map(str, services)),
                "unanswered": number}})
            for name in services:
                self._report(name, f"endpoint {format_socket(*where)} is in quarantine on this node: "
                                   f"{number} of {number} attempts unanswered")
        for where in before.keys() - sentences.keys():
            log.info("endpoint is out of quarantine", extra={"fields": {
                "endpoint": format_socket(*where), "seconds": round(now - before[where].since, 1)}})
