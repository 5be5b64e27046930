"""Node ports on loopback: the core relays them for modes whose rules cannot serve them there (KEP-6032).

The kernel routes no packet from a loopback address to an endpoint, unless route_localnet lets it, which IPv6
does not have. Unlike kube-proxy, UDP is relayed, too.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol as TypingProtocol

from kproxy_core.contract.values import IsRemoved, Measurement, Scope, Update
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.relay.counts import GAUGES, Counter
from kproxy_core.linux.relay.orders import Serve, WorkerSettings
from kproxy_core.linux.relay.pool import HANG_SECONDS, Worker, WorkerPool
from kproxy_core.model.address import Family, Protocol, format_address, format_socket
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.model.timing import FIRST, STABLE, Backoff
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.observer import SyncObserver

log = logging.getLogger("kproxy.run")

RELAYED = (Protocol.TCP, Protocol.UDP)

_SETTINGS = WorkerSettings(udp_idle=30.0, drain=-1.0, half_closed=3600.0)
"""As in connection tracking (nf_conntrack_udp_timeout, ..._tcp_timeout_close_wait)."""

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
"""Seconds until a listener that failed is tried again."""

_PREPARED = 3.0
"""Longest time in seconds that a sync waits for relays which the mode before did not need."""
_FOLLOWED = 0.5
"""Longest time in seconds that a sync waits for the relays that follow it; not while an answer is late."""
_CHECKED = 10.0
"""Interval in seconds at which the worker process has to answer."""
_CLOSED = 1.0
"""Longest time in seconds that the end of the proxy waits for an answer."""

_PREFIX = "kubeproxy_nftables_localhost_nodeport_"
_OWN_PREFIX = "kproxy_localhost_node_port_"

Task = Callable[[], None]
Post = Callable[[Task], None]
"""Makes a call on the loop's thread."""
Later = Callable[[float, Task], None]
"""Makes a call on the loop's thread after so many seconds."""


def by_timer(post: Post) -> Later:
    """Return what makes calls by *post* once their time has come."""
    def later(seconds: float, call: Task) -> None:
        timer = threading.Timer(seconds, post, (call,))
        timer.daemon = True
        timer.start()

    return later


class Asking(TypingProtocol):
    """A backend."""

    def wants_relays(self, family: Family, protocol: Protocol) -> bool: ...


def order_for(plan: ServicePlan, number: int) -> Serve | None:
    """Return the order to relay the node port of *plan* on loopback; None: to no endpoint."""
    endpoints = tuple((format_address(d.address), d.port) for d in plan.relayed_to)
    if not endpoints:
        return None
    return Serve(
        number, number, plan.key.protocol is Protocol.UDP, format_address(plan.family.loopback),
        plan.node_port, endpoints, plan.affinity_seconds)


class _Courier:
    """A thread that talks to the worker process, which may hang: the loop's thread waits for none."""

    def __init__(self, check: Task) -> None:
        """*check* is called every `_CHECKED` seconds without a task."""
        self._check = check
        self._tasks = SimpleQueue[Task | None]()
        self._unfinished = 0
        self._finished = threading.Condition()
        """Guards the number of unfinished tasks."""
        self._thread: threading.Thread | None = None

    def put(self, task: Task) -> None:
        """Have *task* done after all earlier ones. Starts the thread."""
        with self._finished:
            self._unfinished += 1
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kproxy-relays", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to *seconds* until all tasks are done. Return whether they are."""
        with self._finished:
            return self._finished.wait_for(lambda: not self._unfinished, seconds)

    def end(self, seconds: float) -> bool:
        """End the thread after all tasks. Return whether it ended within *seconds*."""
        if self._thread is None:
            return True
        self._tasks.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_CHECKED)
            except Empty:
                self._check()
                continue
            if task is None:
                return
            task()
            with self._finished:
                self._unfinished -= 1
                self._finished.notify_all()


class NodePortRelays(SyncObserver):
    """Has one worker process relay node ports for whichever backend serves, and keeps it across a switch.

    The process runs while a node port is relayed or a connection is open. The loop's thread waits for it, at
    an update, for half a second at most, and not again while an answer is late: answers are calls that it
    gets. A mode that is tried gets its relays before it writes rules, which may replace the other's, and
    nothing is closed before it serves (`settle`).
    """

    def __init__(
        self, failed: Callable[[ServiceName, str], None], show: Callable[[Family, str], None],
        post: Post, later: Later, serving: Asking | None = None,
    ) -> None:
        """*failed* is told of each listener that cannot be opened. *show* is given what is not served in a
        family, "" for nothing, after each change. *post* and *later* make calls on the
        loop's thread, and may themselves be called from any. *serving*: others are only tried until `settle`;
        None: none is.
        """
        self._failed = failed
        self._show = show
        self._post = post
        self._later = later
        self._serving = serving
        self._workers = WorkerPool(1, _SETTINGS, patience=HANG_SECONDS)
        self._courier = _Courier(self._check)
        self._orders: dict[int, Serve | None] = {}
        """Those that the courier has not taken yet."""
        self._ordering = threading.Lock()
        """Guards the orders."""
        self._numbers = itertools.count(1)
        self._protocols: dict[Family, tuple[Protocol, ...]] = {}
        """Those that the backend wants relayed, by family."""
        self._relays: dict[Family, dict[ServicePortKey, Serve]] = {family: {} for family in Family}
        self._opening: set[int] = set()
        """Relays of which the worker process has not said yet that they listen, by number."""
        self._failing: dict[int, str] = {}
        """Relays that do not listen, by number, with the reason."""
        self._outage = ""
        """Why no relay listens; "": the worker process has answered."""
        self._shortage = ""
        """What the worker process was short of at the last check."""
        self._short = 0
        """Connections and datagrams that met a shortage before the last check."""
        self._failures = dict.fromkeys(Family, 0)
        self._exits = 0
        self._backoff = Backoff(first=_FIRST_DELAY, longest=_LONGEST_DELAY)
        self._deaths = Backoff(longest=_LONGEST_DELAY)
        self._is_retry_due = False
        self._is_late = False
        """The worker process did not answer in time, and has not since."""
        self._watched: list[Worker] = []

    def update_started(self, instance: Asking, update: Update) -> None:
        """Listen for what *instance*, which is about to write, wants relayed and the one before did not."""
        family = update.family
        before = self._protocols.get(family, ())
        wanted = self._wanted(instance, update)
        if added := tuple(each for each in wanted if each not in before):
            self._protocols[family] = tuple(each for each in RELAYED if each in before + added)
            self._bring(self._relays[family], added, {
                key: plan for key, plan in update.plans.items() if key.protocol in added})
            if not self.await_answers(_PREPARED):
                log.warning("relays for node ports on loopback do not listen yet")

    def await_answers(self, seconds: float) -> bool:
        """Wait up to *seconds* for the worker process. Return whether it has answered all orders."""
        return self._courier.wait(seconds)

    def update_succeeded(self, instance: Asking, update: Update) -> None:
        """Relay what *instance*, which has written, wants. O(changed), unless it wants something else.

        A listener that cannot be opened does not make the sync fail: everything else is served.
        """
        family = update.family
        protocols = self._wanted(instance, update)
        if self._serving is not None and instance is not self._serving:
            kept = self._protocols.get(family, ())
            protocols = tuple(each for each in RELAYED if each in protocols + kept)
        changed: Mapping[ServicePortKey, ServicePlan | None] = update.changed
        if update.scope is Scope.RESYNC or protocols != self._protocols.get(family, ()):
            self._protocols[family] = protocols
            changed = {**dict.fromkeys(self._relays[family]), **update.plans} if protocols else (
                dict.fromkeys(self._relays[family]))
        if protocols or changed:
            self._bring(self._relays[family], protocols, changed)
            self._is_late = self._is_late or not self.await_answers(_FOLLOWED)

    def settle(self, backend: Asking) -> None:
        """Close what only a mode before *backend*, which serves now, wanted relayed."""
        self._serving = backend
        for family, before in self._protocols.items():
            kept = tuple(each for each in before if backend.wants_relays(family, each))
            if kept != before:
                self._protocols[family] = kept
                self._bring(self._relays[family], kept, {
                    key: None for key in self._relays[family] if key.protocol not in kept})

    @staticmethod
    def _wanted(backend: Asking, update: Update) -> tuple[Protocol, ...]:
        return tuple(each for each in RELAYED
                     if update.node.relays_node_ports and backend.wants_relays(update.family, each))

    def measure(self) -> list[Measurement]:
        """Return the metrics of KEP-6032, for each family in which a backend has wanted relays."""
        found = []
        for family in [each for each, protocols in list(self._protocols.items()) if protocols]:
            labels = {"ip_family": family.label}
            numbers = {serve.relay for serve in list(self._relays[family].values())}
            listening = 0 if self._outage else len(numbers - self._failing.keys() - self._opening)
            found += [
                Measurement(f"{_PREFIX}listeners", "Node ports that are relayed on loopback", "gauge",
                            listening, labels),
                Measurement(f"{_PREFIX}listener_creation_failures_total",
                            "Failures to listen for a node port on loopback", "counter",
                            self._failures[family], labels),
            ]  # fmt: skip
        if found:
            found += [
                Measurement(f"{_OWN_PREFIX}worker_exits_total",
                            "Exits of the relay worker for node ports on loopback", "counter", self._exits),
                Measurement(f"{_OWN_PREFIX}shortages_total",
                            "Connections and datagrams to node ports on loopback that met a shortage of "
                            "descriptors, local ports or memory", "counter",
                            self._workers.count(Counter.SHORTAGES)),
            ]  # fmt: skip
        return found

    def problem(self, family: Family, key: ServicePortKey) -> str:
        """Return why the relay of a node port does not listen; "" if it does, or there is none.

        From any thread.
        """
        serve = self._relays[family].get(key)
        return self._problem(family, key, serve) if serve is not None else ""

    def reset_connections(self, family: Family, is_removed: IsRemoved) -> int:
        """Reset relayed connections to removed endpoints. Return their number. From any thread."""
        keys = {serve.relay: key for key, serve in list(self._relays[family].items())}
        return self._workers.reset_removed(keys, is_removed) if keys else 0

    def close(self) -> None:
        """End the process, and with it every connection."""
        if not self._courier.end(_CLOSED):
            self._workers.kill()
            self._courier.end(_CLOSED)
        self._workers.close()

    def _bring(
        self, relays: dict[ServicePortKey, Serve], protocols: tuple[Protocol, ...],
        changed: Mapping[ServicePortKey, ServicePlan | None],
    ) -> None:
        """Bring the *relays* of one family to *changed* plans. Those not needed are closed first."""
        closed: dict[int, Serve | None] = {}
        opened: dict[int, Serve | None] = {}
        for key, plan in changed.items():
            held = relays.pop(key, None)
            want = None
            if plan is not None and key.protocol in protocols:
                is_same = held is not None and held.port == plan.node_port
                want = order_for(plan, held.relay if held is not None and is_same else next(self._numbers))
            if held is not None and (want is None or want.relay != held.relay):
                closed[held.relay] = None
                self._opening.discard(held.relay)
            if want is not None:
                relays[key] = opened[want.relay] = want  # The pool knows which worker has it already.
                if held is None or want.relay != held.relay:
                    self._opening.add(want.relay)
        if closed or opened:
            self._order({**closed, **opened})
        if closed:
            self._rest()

    def _order(self, orders: Mapping[int, Serve | None]) -> None:
        """Give *orders* to the worker process, which is replaced if it has exited."""
        with self._ordering:
            self._orders.update(orders)
        self._courier.put(self._send)

    def _send(self) -> None:
        """Send all orders to the worker process, and have the loop's thread called with its answer."""
        with self._ordering:
            orders, self._orders = self._orders, {}
        failures, problem = dict[int, str](), ""
        try:
            failures = self._workers.serve(orders)
        except HostError as error:
            problem = str(error)
        self._post(partial(self._answered, orders, failures, problem))

    def _answered(
        self, orders: Mapping[int, Serve | None], failures: Mapping[int, str], problem: str
    ) -> None:
        """Take the answer to *orders*: the relays that failed, or a *problem* of all. Retry those."""
        if problem and not self._outage:
            log.error("no node port is relayed on loopback", extra={"fields": {"problem": problem}})
        had_outage, self._outage = bool(self._outage), problem
        self._is_late = False
        self._opening.difference_update(orders)
        before = {number: self._failing.pop(number, "") for number in (*orders, *failures)}
        for family, relays in self._relays.items():
            for key, serve in relays.items() if failures else ():
                if reason := failures.get(serve.relay):
                    self._failing[serve.relay] = reason
                    self._failures[family] += 1
                    if reason != before[serve.relay]:
                        self._report(family, key, serve)
        if self._failing or problem:
            self._retry_later()
        else:
            self._backoff.reset()
        if problem or had_outage or self._failing or any(before.values()):
            self._show_problems()
        self._watch()

    def _report(self, family: Family, key: ServicePortKey, serve: Serve) -> None:
        problem = self._problem(family, key, serve)
        self._failed(key.service, problem)
        log.error("node port is not relayed on loopback", extra={"fields": {"problem": problem}})

    def _problem(self, family: Family, key: ServicePortKey, serve: Serve) -> str:
        """Return why a relay does not listen; "" if it does."""
        why = self._outage or self._failing.get(serve.relay, "")
        if not why and serve.relay in self._opening:
            why = "the relay worker has not answered yet"
        return f"{key} is not served on {format_socket(family.loopback, serve.port)}: {why}" if why else ""

    def _show_problems(self) -> None:
        for family, relays in self._relays.items():
            found = [self._problem(family, key, serve) for key, serve in relays.items()
                     if self._outage or serve.relay in self._failing]
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            self._show(family, f"{found[0]}{more}" if found else self._shortage if relays else "")

    def _retry_later(self) -> None:
        if not self._is_retry_due:
            self._is_retry_due = True
            self._later(self._backoff.delay(), self._retry)

    def _retry(self) -> None:
        self._is_retry_due = False
        self._order({
            serve.relay: serve for relays in self._relays.values() for serve in relays.values()
            if serve.relay in self._failing
        })

    # The worker process ----------------------------------------------------------------------

    def _rest(self) -> None:
        """End the process as soon as nothing is relayed and no connection is open."""
        if any(self._relays.values()):
            return
        if any(map(self._workers.count, GAUGES)):
            self._later(_LONGEST_DELAY, self._rest)
        else:
            self._courier.put(partial(self._workers.close, unless_wanted=True))

    def _check(self) -> None:
        """Kill the process if it does not answer, and say what it is short of. On the courier's thread."""
        self._workers.check()
        short = self._workers.count(Counter.SHORTAGES)
        new, self._short = short - self._short, short
        shortage = "too few descriptors, local ports or memory for relays" if new else ""
        if shortage != self._shortage:
            self._post(partial(self._set_shortage, shortage, new))

    def _set_shortage(self, shortage: str, new: int) -> None:
        self._shortage = shortage
        if shortage:
            log.warning("relays on loopback met a shortage", extra={"fields": {
                "problem": shortage, "connections": new}})
        self._show_problems()

    def _watch(self) -> None:
        """Have a thread wait for the exit of each new worker process."""
        watched, self._watched = self._watched, self._workers.running()
        for worker in self._watched:
            if worker not in watched:
                threading.Thread(
                    target=self._await_exit, args=(worker,), name="kproxy-relay-exit", daemon=True).start()

    def _await_exit(self, worker: Worker) -> None:
        worker.process.wait()
        self._post(partial(self._exited, worker, time.monotonic() - worker.started))

    def _exited(self, worker: Worker, lasted: float) -> None:
        """Replace *worker*, unless that has been done or is not needed; later, if such processes die soon."""
        if worker not in self._workers.running():
            return
        self._exits += 1
        log.error("relay worker exited", extra={"fields": {
            "pid": worker.process.pid, "status": worker.process.returncode}})
        delay = self._deaths.delay(lasted)
        if lasted >= STABLE or delay == FIRST:
            self._order({})
        else:
            self._later(delay, partial(self._order, {}))
