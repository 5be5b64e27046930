"""Node ports on loopback: the core relays them for modes whose rules cannot serve them there (KEP-6032).

The kernel routes no packet from a loopback address to an endpoint, unless route_localnet lets it, which IPv6
does not have. Unlike kube-proxy, UDP is relayed, too.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol as TypingProtocol

from kproxy_core.contract.values import Measurement, Scope, Update
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.relay.counts import GAUGES
from kproxy_core.linux.relay.orders import Serve, WorkerSettings
from kproxy_core.linux.relay.pool import Worker, WorkerPool
from kproxy_core.model.address import Family, Protocol, format_address, format_socket
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.model.timing import Backoff
from kproxy_core.plan.service_plan import ServicePlan

log = logging.getLogger("kproxy.run")

RELAYED = (Protocol.TCP, Protocol.UDP)

_SETTINGS = WorkerSettings(udp_idle=30.0, drain=-1.0, half_closed=3600.0)
"""As in connection tracking (nf_conntrack_udp_timeout, ..._tcp_timeout_close_wait)."""

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
"""Seconds until a listener that failed is tried again."""

_PREFIX = "kubeproxy_nftables_localhost_nodeport_"

Post = Callable[[Callable[[], None]], None]
"""Makes a call on the loop's thread."""
Later = Callable[[float, Callable[[], None]], None]
"""Makes a call on the loop's thread after so many seconds."""


def by_timer(post: Post) -> Later:
    """Return what makes calls by *post* once their time has come."""
    def later(seconds: float, call: Callable[[], None]) -> None:
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


class NodePortRelays:
    """Has one worker process relay node ports for whichever backend serves, and keeps it across a switch.

    The process runs while a node port is relayed or a connection is open. Every sync is prepared and
    followed, on the loop's thread. A mode that is tried gets its relays before it writes rules, which may
    replace the other's, and nothing is closed before it serves.
    """

    def __init__(
        self, failed: Callable[[ServiceName, str], None], show: Callable[[Family, str], None],
        post: Post, later: Later, serves: Callable[[Asking], bool] = lambda _: True,
    ) -> None:
        """*failed* is told of each listener that cannot be opened. *show* is given what is not served in a
        family, "" for nothing, after each change. *post* and *later* make calls on the
        loop's thread, and may themselves be called from any. *serves*: the backend is not only tried.
        """
        self._failed = failed
        self._show = show
        self._post = post
        self._later = later
        self._serves = serves
        self._workers = WorkerPool(1, _SETTINGS)
        self._numbers = itertools.count(1)
        self._protocols: dict[Family, tuple[Protocol, ...]] = {}
        """Those that the backend wants relayed, by family."""
        self._relays: dict[Family, dict[ServicePortKey, Serve]] = {family: {} for family in Family}
        self._failing: dict[int, str] = {}
        """Relays that do not listen, by number, with the reason."""
        self._failures = dict.fromkeys(Family, 0)
        self._backoff = Backoff(first=_FIRST_DELAY, longest=_LONGEST_DELAY)
        self._is_retry_due = False
        self._watched: list[Worker] = []

    def prepare(self, backend: Asking, update: Update) -> None:
        """Listen for what *backend*, which is about to sync, wants relayed and the one before did not."""
        family = update.family
        before = self._protocols.get(family, ())
        wanted = self._wanted(backend, update)
        if added := tuple(each for each in wanted if each not in before):
            self._protocols[family] = tuple(each for each in RELAYED if each in before + added)
            self._bring(self._relays[family], added, {
                key: plan for key, plan in update.plans.items() if key.protocol in added})

    def follow(self, backend: Asking, update: Update) -> None:
        """Relay what *backend*, which has synced, wants relayed. O(changed), unless it wants something else.

        A listener that cannot be opened does not make the sync fail: everything else is served.
        """
        family = update.family
        protocols = self._wanted(backend, update)
        if not self._serves(backend):
            kept = self._protocols.get(family, ())
            protocols = tuple(each for each in RELAYED if each in protocols + kept)
        changed: Mapping[ServicePortKey, ServicePlan | None] = update.changed
        if update.scope is Scope.RESYNC or protocols != self._protocols.get(family, ()):
            self._protocols[family] = protocols
            changed = {**dict.fromkeys(self._relays[family]), **update.plans} if protocols else (
                dict.fromkeys(self._relays[family]))
        if protocols or changed:
            self._bring(self._relays[family], protocols, changed)

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
            found += [
                Measurement(f"{_PREFIX}listeners", "Node ports that are relayed on loopback", "gauge",
                            len(numbers - self._failing.keys()), labels),
                Measurement(f"{_PREFIX}listener_creation_failures_total",
                            "Failures to listen for a node port on loopback", "counter",
                            self._failures[family], labels),
            ]  # fmt: skip
        return found

    def problem(self, family: Family, key: ServicePortKey) -> str:
        """Return why the relay of a node port does not listen; "" if it does, or there is none.

        From any thread.
        """
        serve = self._relays[family].get(key)
        return self._problem(family, key, serve) if serve is not None and serve.relay in self._failing else ""

    def close(self) -> None:
        """End the process, and with it every connection."""
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
            if want is not None:
                relays[key] = opened[want.relay] = want  # The pool knows which worker has it already.
        if closed or opened:
            self._order({**closed, **opened})
        if closed:
            self._rest()

    def _order(self, orders: Mapping[int, Serve | None]) -> None:
        """Give *orders* to the worker process, which is replaced if it has exited. Retry those that fail."""
        try:
            failures = self._workers.serve(orders)
        except HostError as error:
            failures = {number: str(error) for number, serve in orders.items() if serve is not None}
            self._retry_later()
        before = {number: self._failing.pop(number, "") for number in orders}
        for family, relays in self._relays.items():
            for key, serve in relays.items() if failures else ():
                if reason := failures.get(serve.relay):
                    self._failing[serve.relay] = reason
                    self._failures[family] += 1
                    if reason != before.get(serve.relay):
                        self._report(family, key, serve)
        if self._failing:
            self._retry_later()
        else:
            self._backoff.reset()
        if self._failing or any(before.values()):
            self._show_problems()
        self._watch()

    def _report(self, family: Family, key: ServicePortKey, serve: Serve) -> None:
        problem = self._problem(family, key, serve)
        self._failed(key.service, problem)
        log.error("node port is not relayed on loopback", extra={"fields": {"problem": problem}})

    def _problem(self, family: Family, key: ServicePortKey, serve: Serve) -> str:
        where = format_socket(family.loopback, serve.port)
        return f"{key} is not served on {where}: {self._failing.get(serve.relay, '')}"

    def _show_problems(self) -> None:
        for family, relays in self._relays.items():
            found = [self._problem(family, key, serve) for key, serve in relays.items()
                     if serve.relay in self._failing]
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            self._show(family, f"{found[0]}{more}" if found else "")

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
            self._workers.close()

    def _watch(self) -> None:
        """Have a thread wait for the exit of each new worker process."""
        watched, self._watched = self._watched, self._workers.running()
        for worker in self._watched:
            if worker not in watched:
                threading.Thread(
                    target=self._await_exit, args=(worker,), name="kproxy-relays", daemon=True).start()

    def _await_exit(self, worker: Worker) -> None:
        worker.process.wait()
        self._post(partial(self._exited, worker))

    def _exited(self, worker: Worker) -> None:
        """Replace *worker*, unless that has been done, will be, or is not needed."""
        if worker in self._workers.running() and not self._is_retry_due:
            log.error("relay worker exited", extra={"fields": {"pid": worker.process.pid}})
            self._order({})

