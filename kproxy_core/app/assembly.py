"""The running proxy, assembled from its parts."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kproxy_core import __version__
from kproxy_core.app import preparation
from kproxy_core.app.control import ControlServer
from kproxy_core.app.dispatch import Dispatcher
from kproxy_core.app.errors import RestartNeeded
from kproxy_core.app.family_checks import doubts, unservable
from kproxy_core.app.notify import Heartbeat, ServiceManager
from kproxy_core.app.requests import Explain, Top
from kproxy_core.config.check import FEATURE_GATES
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import BindAddress, Config, effective, effective_flags
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import Fallback
from kproxy_core.kube.store import Store
from kproxy_core.linux import process, programs
from kproxy_core.linux.addresses import AddressWatch
from kproxy_core.linux.conntrack_limits import ConntrackLimits
from kproxy_core.linux.process import cpu_seconds
from kproxy_core.model.address import Family
from kproxy_core.model.events import Source
from kproxy_core.model.service import ServiceName
from kproxy_core.modes.choice import ChosenMode, choose, conclude
from kproxy_core.modes.desired import DesiredMode, NodeLabel
from kproxy_core.modes.followed_file import FollowedFile
from kproxy_core.modes.journal import Journal, Reason
from kproxy_core.modes.retirement import RetiringModes
from kproxy_core.modes.settings import (
    Configuration,
    StartFailed,
    backend_settings,
    mode_settings,
    node_settings,
    pacing,
    served_families,
    settings_of_modes,
)
from kproxy_core.modes.switch import ModeSwitch
from kproxy_core.modes.takeover import Takeover
from kproxy_core.observe import logs
from kproxy_core.observe.events import EventRecorder
from kproxy_core.observe.health import ProxyHealth, ServiceHealth
from kproxy_core.observe.history import ChangeLog, SyncHistory
from kproxy_core.observe.last_resort import LastResortReports
from kproxy_core.observe.logs import innermost_calls
from kproxy_core.observe.messages import Handler
from kproxy_core.observe.metrics import Metrics, SyncMetrics, measure_checks, measure_problems
from kproxy_core.observe.pages import About, Debug, health_routes, metrics_routes
from kproxy_core.observe.server import HttpServer
from kproxy_core.plan.quarantine import Quarantined
from kproxy_core.sync.endpoint_health import EndpointHealth
from kproxy_core.sync.flows import CleanupResult, EarlyConnections, FlowCleaner, StaleFlowObserver
from kproxy_core.sync.isolation import UnservedServices
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeFacts, NodeSettings
from kproxy_core.sync.node_port_relays import NodePortRelays, by_timer
from kproxy_core.sync.observer import SyncObserver
from kproxy_core.sync.resets import ConnectionResets, ResetResult

if TYPE_CHECKING:
    from kproxy_core.app.answers import Answers
    from kproxy_core.app.overview import Overview
    from kproxy_core.kube.access import CurrentAccess
    from kproxy_core.kube.requests import Observe
    from kproxy_core.observe.traffic.recorder import TrafficRecorder

log = logging.getLogger("kproxy.run")

# The end of the process after SIGTERM: soon, whatever a program or a server does.

PROGRAMS_END = 2.0
"""Seconds after a signal when running programs are killed."""
PROCESS_ENDS = 9.0
"""Seconds after a signal when the process exits, even if it is not done: ``docker stop`` waits for 10."""


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call *stop* from a thread after SIGTERM or SIGINT, and make sure that the process ends.

    A signal handler runs in the main thread. If the signal arrives just before that thread falls asleep, the
    handler runs only at the next wake-up, whereas Python writes to the wake-up descriptor at once.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        ours.recv(1)
        stop()
        time.sleep(PROGRAMS_END)
        programs.interrupt()
        time.sleep(PROCESS_ENDS - PROGRAMS_END)
        log.error("exiting before everything has ended", extra={"fields": {"threads": innermost_calls()}})
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=wait, name="kproxy-signals", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


# The parts that the configuration decides.


def make_recorder(
    config: Config, families: Sequence[Family], instance: BackendInstance, metrics: Metrics
) -> "TrafficRecorder | None":
    """Return the recorder of connections, whose totals are in *metrics*; None if none are counted."""
    if not config.kproxy.count_traffic:
        return None
    from kproxy_core.observe.traffic.recorder import FrontendOwners, StoredTotals, TrafficRecorder
    from kproxy_core.observe.traffic.series import TrafficCollector

    owners = FrontendOwners(families, time.monotonic)
    recorder = TrafficRecorder(
        families, instance, owners, StoredTotals(config.kproxy.state_directory), time.monotonic)
    metrics.registry.register(TrafficCollector(
        recorder, endpoints=config.kproxy.traffic_metrics == "endpoint", limit=config.kproxy.max_series))
    return recorder


def make_source(
    config: Config, node_name: str, access: "CurrentAccess", observe: "Observe",
    report: Callable[[str], None] = lambda _: None,
) -> Source:
    """Return the source of objects: the API server of *access*, unless *config* names a directory.

    *observe* is called after each request to the API server. *report* is told what keeps a directory from
    being read; "": nothing does. Raises StartFailed if the source cannot be used.
    """
    if config.kproxy.manifests:
        from kproxy_core.kube.directory import DirectorySource

        return DirectorySource(Path(config.kproxy.manifests), node_name, report=report)
    from kproxy_core.kube.access import AccessError
    from kproxy_core.kube.reflector import KubernetesSource
    from kproxy_core.kube.transport import JSON, accept_header

    client = config.client
    configured = client.accept_content_types or client.content_type
    accept = accept_header(configured)
    if accept is None:
        log.info("no known content type in clientConnection, requesting JSON",
                 extra={"fields": {"configured": configured}})
    try:
        return KubernetesSource(access, node_name, accept=accept or JSON, qps=client.qps, burst=client.burst,
                                observe=observe)
    except AccessError as error:
        raise StartFailed(str(error)) from error


def make_store(config: Config, families: tuple[Family, ...], source: Source) -> Store:
    external_ips = config.feature_gates.get("AllowServiceExternalIPs", True)
    return Store(families, source.kinds, time.time(), external_ips=external_ips,
                 last_resort=config.kproxy.last_resort_seconds,
                 avoid_silent=config.kproxy.endpoint_health == "passive")


def make_events(
    config: Config, node_name: str, access: "CurrentAccess", observe: "Observe"
) -> EventRecorder:
    """Return the recorder of cluster events; silent without an API server. *observe*: see `make_source`."""
    if config.kproxy.manifests:
        return EventRecorder(node_name, None)
    from kproxy_core.observe.event_writer import write_event

    return EventRecorder(node_name, partial(write_event, access, _machine_name(), observe))


def _machine_name() -> str:
    return socket.gethostname().strip().lower()


def make_about(config: Config, flags: Flags) -> About:
    return About(
        mode=config.mode,
        version=config.reported_version or __version__,
        configuration=effective(config),
        flags=effective_flags(flags),
        statusz=config.feature_gates.get("ComponentStatusz", True),
        flagz=config.feature_gates.get("ComponentFlagz", True),
        many_series=config.kproxy.count_traffic,
        names=frozenset(filter(None, (_machine_name(), config.hostname_override))),
    )


def set_up(config: Config, registry: Registry, configuration: Configuration, access: "CurrentAccess") -> None:
    """Do everything that needs all privileges; `run` then needs fewer.

    Also prepares the `switch_modes` of the configuration. Raises BackendError, HostError or StartFailed for
    the mode that will serve; another mode's failure is only logged.
    """
    config, instance, _, families = choose(configuration, registry, config.mode, served_families())
    instance.close()
    settings = node_settings(config, registry.load(config.mode))
    events = make_events(config, settings.name, access, lambda _: None)
    if not preparation.tune_conntrack(preparation.limits(config), events):
        log.warning("the kernel does not track connections yet; their limits and timeouts are not set")
    registry.prepare(config.mode, backend_settings(config, families))
    others = preparation.prepare_others(
        registry, config.kproxy.switch_modes, settings_of_modes(configuration, families))
    events.close()
    log.info("privileged initialisation finished", extra={
        "fields": {"mode": config.mode, "also_prepared": ",".join(others)}})


def run(
    config: Config, registry: Registry, configuration: Configuration, access: "CurrentAccess",
    manager: ServiceManager,
) -> None:
    """Run the proxy until SIGTERM, SIGINT or a change of the configuration file. *access*: the API server.

    Serves in the mode of *config* or its fallback, or without a mode in the best that works. The rules remain
    after the end, except those that redirect to this process. Raises BackendError, HostError, StartFailed or
    RestartNeeded.
    """
    preparation.tune_interpreter()
    preparation.protect_from_oom_killer(config.oom_score_adj)
    preparation.raise_file_limit()
    if config.mode == configuration.mode:
        Journal(config.kproxy.state_directory).clear_unless_switched_to(configuration.mode)
    else:
        log.info("resuming earlier mode switch", extra={
            "fields": {"configured": configuration.mode, "mode": config.mode}})
    chosen = choose(configuration, registry, config.mode, served_families())
    if problem := unservable(chosen.config, chosen.families):
        raise StartFailed(problem)
    _assemble(chosen, registry, configuration, access, manager).run()
    log.info("stopped")


def _assemble(
    chosen: ChosenMode, registry: Registry, configuration: Configuration, access: "CurrentAccess",
    manager: ServiceManager,
) -> "_Proxy":
    """Make all parts without starting them, each after those that it needs. Raises StartFailed."""
    config, instance, fallback, families = chosen
    node = node_settings(config, registry.load(config.mode))
    log.info("starting", extra={"fields": {
        "version": __version__, "mode": config.mode, "node": node.name,
        "families": ",".join(family.label for family in families),
    }})
    log.debug("flags", extra={"fields": configuration.flags})

    # What the others report to.
    metrics = Metrics(config.mode, __version__)
    sync_metrics = SyncMetrics(metrics.registry, config.mode, families, time.time)
    for name, enabled in config.feature_gates.items():
        metrics.set_gate(name, FEATURE_GATES[name].stage, enabled)
    health = ProxyHealth(
        families, timeout=2 * config.sync_period, node_required=not config.kproxy.manifests)
    health.hold("other modes' leftovers have not been removed yet")
    metrics.add_collector(lambda: [tuple(measure_problems(health.all_problems()))])
    events = make_events(config, node.name, access, metrics.client.record)
    about = make_about(config, configuration.flags)
    shown = _ShownMode(about, metrics, sync_metrics, health, events)

    # Objects.
    source = make_source(config, node.name, access, metrics.client.record,
                         partial(health.report, "manifests", None))
    if config.kproxy.manifests:
        from kproxy_core.kube.checks import CheckedSource

        checked = source = CheckedSource(source)
        metrics.add_collector(lambda: [tuple(measure_checks(checked.results()))])
    health.include("objects", lambda: map(str, source.problems()))
    store = make_store(config, families, source)
    events.report_node("Normal", "Starting")
    if fallback is not None:
        shown.fell_back(fallback)
    limits = preparation.limits(config)
    privileged = "CAP_NET_ADMIN" in process.network_privileges()
    if not privileged:
        log.info("without CAP_NET_ADMIN, leftovers and conntrack entries are not touched")
    tuned = not privileged or preparation.tune_conntrack(limits, events)

    # The loop, and what calls it.
    loop = Loop(families, store, NodeFacts(node, frozenset()), instance, pacing=partial(pacing, config),
                clock=time.monotonic, cpu=cpu_seconds)
    relays = NodePortRelays(
        partial(events.report_service, "FailedToListenOnNodePort"),
        partial(health.report, "node ports on localhost"), loop.post, by_timer(loop.post), instance)

    def quarantine(endpoints: Quarantined, services: Collection[ServiceName]) -> None:
        loop.post(partial(loop.set_quarantined, endpoints, services))

    endpoint_health = EndpointHealth(
        quarantine, partial(events.report_service, "EndpointInQuarantine", action="ChooseEndpoints"),
        count_refusals=config.kproxy.count_refusals)
    heartbeat = Heartbeat(manager, loop.post, prepare=health.all_problems,
                          status=partial(_status, about, health, store), alive=health.alive)
    server = HttpServer()
    health.include("listeners", server.problems)
    traffic = make_recorder(config, families, instance, metrics)
    history = SyncHistory() if config.enable_profiling else None
    unserved = UnservedServices(partial(events.report_service, "FailedToProgram"))

    # Modes.
    def mode_changed(serving: BackendInstance) -> None:
        loop.post(partial(relays.settle, serving))
        if traffic is not None:
            layers = map(registry.layers, (about.mode, serving.mode))
            traffic.switched(serving, shares=len({layer[0] for layer in layers}) == 1)
        shown.changed(serving.mode, effective(configuration.of(serving.mode)))
        _warn_of_unaddressed(serving, families)
        loop.post(heartbeat.beat)

    journal = Journal(config.kproxy.state_directory)
    settings_of = settings_of_modes(configuration, families)
    settings_of_mode = partial(mode_settings, configuration, registry, families)
    retiring = RetiringModes(registry, settings_of, config.mode, preparation.return_freed_memory)
    switch = ModeSwitch(
        loop, registry, retiring, journal, instance=instance, configured=configuration.mode,
        mode_settings=settings_of_mode, mode_changed=mode_changed,
        reason=entry.reason if (entry := journal.read()) is not None else Reason.CONFIGURATION)
    desired = DesiredMode(
        switch, events, health, key=config.kproxy.mode_from_node_label, modes=registry.modes,
        conclude=partial(conclude, configuration, registry, families), fell_back=shown.fell_back)
    takeover = Takeover(registry, settings_of, switch, retiring, health)
    metrics.add_collector(lambda: [
        *switch.instance.measure(), retiring.measure(), relays.measure(), registry.calls.measure(),
        endpoint_health.measure(), unserved.measure()])

    # Requests. A start needs none of what the two modules import.
    @cache
    def answers() -> "Answers":
        from kproxy_core.app.answers import Answers

        return Answers(loop, registry, switch, store, settings_of=settings_of,
                       mode_settings=settings_of_mode, relay_problem=relays.problem)

    @cache
    def overview() -> "Overview":
        from kproxy_core.app.overview import Overview

        return Overview(loop, health, source.problems, about, history, traffic, node.name,
                        lambda: {"configured": switch.configured, "before": switch.before,
                                 "label": desired.named_by})

    proxy = _Proxy(
        config=config, registry=registry, configuration=configuration, families=families, node=node,
        metrics=metrics, health=health, events=events, about=about, source=source, store=store, loop=loop,
        relays=relays, endpoint_health=endpoint_health, heartbeat=heartbeat, server=server, traffic=traffic,
        retiring=retiring, switch=switch, desired=desired, takeover=takeover,
        dispatcher=Dispatcher(registry, switch, desired, metrics, about, answers, overview),
        limits=limits, privileged=privileged, tuned=tuned)

    # Everything that is done around a sync, in this order at each event of `SyncObserver`.
    loop.observe([
        relays,
        health,
        *(ServiceHealth(family, server, health.healthy,
                        partial(events.report_service, "FailedToStartServiceHealthcheck"))
          for family in families),
        sync_metrics,
        LastResortReports(partial(events.report_service, "LastResort", action="ChooseEndpoints")),
        ChangeLog(),
        *([traffic.owners] if traffic is not None else ()),
        *([history] if history is not None else ()),
        *((
            _stale_flows(families, loop, sync_metrics),
            EarlyConnections(sync_metrics.record_cleanup),
            ConnectionResets(families, partial(_connections_reset, sync_metrics, health),
                             relayed=relays.reset_connections),
            endpoint_health,
        ) if privileged else ()),
        *([NodeLabel(key, desired.set_label)] if (key := config.kproxy.mode_from_node_label) else ()),
        unserved,
        preparation.FreedMemory(),
        proxy,
    ])
    return proxy


def _stale_flows(families: Sequence[Family], loop: Loop, metrics: SyncMetrics) -> StaleFlowObserver:
    """Return an observer whose flows a thread deletes, and whose results are handled on the loop's."""
    def cleaned(result: CleanupResult) -> None:
        if result.deleted is not None:
            metrics.record_cleanup(result.family, result.deleted, result.seconds)
        loop.post(partial(observer.finish, result))

    observer = StaleFlowObserver(families, FlowCleaner(cleaned).clean)
    return observer


def _connections_reset(metrics: SyncMetrics, health: ProxyHealth, result: ResetResult) -> None:
    metrics.record_resets(result)
    health.report("connections to removed endpoints", result.family, result.problem)


def _warn_of_unaddressed(instance: BackendInstance, families: Sequence[Family]) -> None:
    preparation.warn_of_unaddressed(instance.mode, families, instance.needs_interface_addresses)


def _status(about: About, health: ProxyHealth, store: Store) -> str:
    """Return this process's state in one line, for systemd."""
    problems = "; ".join(health.last_problems())
    return f"mode {about.mode}: {problems or f'{len(store.services)} Services'}"


@dataclass(frozen=True)
class _ShownMode:
    """Where it is shown which mode serves."""

    about: About
    metrics: Metrics
    sync_metrics: SyncMetrics
    health: ProxyHealth
    events: EventRecorder

    def fell_back(self, fallback: Fallback) -> None:
        self.metrics.set_fallback(fallback.wanted, fallback.serving)
        self.events.report_node("Warning", "ModeFallback", str(fallback))
        self.about.fallback = fallback
        self._show_fallback(self.about.mode)

    def changed(self, mode: str, configuration: Mapping[str, Any]) -> None:
        """Show that *mode* serves, with its effective *configuration*."""
        self._show_fallback(mode)
        self.metrics.set_mode(mode)
        self.sync_metrics.set_mode(mode)
        self.about.configuration = configuration
        self.about.mode = mode  # After everything that others read once they have seen it.
        self.events.report_node("Normal", "ModeSwitched", mode)

    def _show_fallback(self, serving: str) -> None:
        self.health.report("mode", None, str(self.about.fallback_to(serving) or ""))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Proxy(SyncObserver):
    """All parts of the process, which starts and stops them. `_assemble` makes it."""

    config: Config
    registry: Registry
    configuration: Configuration
    families: tuple[Family, ...]
    node: NodeSettings
    metrics: Metrics
    health: ProxyHealth
    events: EventRecorder
    about: About
    source: Source
    store: Store
    loop: Loop
    relays: NodePortRelays
    endpoint_health: EndpointHealth
    heartbeat: Heartbeat
    server: HttpServer
    traffic: "TrafficRecorder | None"
    retiring: RetiringModes
    switch: ModeSwitch
    desired: DesiredMode
    takeover: Takeover
    dispatcher: Dispatcher
    limits: ConntrackLimits
    privileged: bool
    """This process may change rules and connection tracking."""
    tuned: bool
    """`limits` are set, or need not be."""
    failures: list[str] = field(default_factory=list)
    """Listeners without which it must not run."""
    restart_needed: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Run until a signal or a change of the configuration file. Raises StartFailed or RestartNeeded."""
        with ExitStack() as parts:
            self._start(parts)
            self.loop.run()
        if self.failures:
            raise StartFailed("; ".join(self.failures))
        if self.restart_needed.is_set():
            raise RestartNeeded("the content of the configuration file has changed: a restart is needed")

    def _start(self, parts: ExitStack) -> None:
        """Start all parts of the process but the loop. Have *parts* stop them in the opposite order.

        Backends are closed last: the other parts measure them, read their counts and change modes.
        """
        parts.callback(self.relays.close)
        parts.callback(lambda: self.switch.instance.close())
        parts.callback(self.retiring.close)
        if self.traffic is not None:
            parts.callback(self.traffic.stop)
        parts.callback(self.server.stop)
        self.server.start()
        self._listen()
        watcher = AddressWatch(self.loop.set_addresses, self.registry.is_of_node)
        parts.callback(watcher.close)
        self.loop.set_addresses(watcher.addresses)
        stop_on_signals(self.loop.stop)
        parts.callback(self.events.close)
        self.source.start(self.loop.emit)
        parts.callback(self.source.stop)
        followed = FollowedFile(self.configuration, self.switch, self.desired, self._need_restart)
        parts.callback(followed.close)
        parts.callback(self.desired.close)
        parts.callback(self.takeover.stop)
        control = ControlServer(self.dispatcher.answer)
        parts.callback(control.stop)
        control.start()
        parts.callback(self.endpoint_health.stop)
        parts.callback(self.heartbeat.stop)
        self.heartbeat.start()

    def all_synced(self) -> None:
        """Finish the start, once every family is in sync."""
        preparation.settle_memory()
        if self.traffic is not None:
            self.traffic.start()
        if not self.tuned and not preparation.tune_conntrack(self.limits, self.events):
            log.warning("the kernel does not track connections; their limits and timeouts are not set")
        if self.privileged:
            for doubt in doubts(self.config, self.node, self.families, self.store.node):
                log.warning("suspicious configuration", extra={"fields": {"because": doubt}})
            _warn_of_unaddressed(self.switch.instance, self.families)
            self.takeover.start()
        else:
            self.health.release()
        self.events.start()
        self.desired.start()
        self.heartbeat.set_ready()

    def _listen(self) -> None:
        if self.config.healthz_bind_address is not None:
            self._listen_at("the health server", "FailedToStartProxierHealthcheck",
                            self.config.healthz_bind_address, health_routes(self.health, self.metrics))
        if self.config.enable_profiling:
            from kproxy_core.observe.pages import page_handlers

            pages = page_handlers(
                self.dispatcher.status, partial(self.dispatcher.answer_page, Top),
                partial(self.dispatcher.answer_page, Explain))
            self.about.debug = Debug(logs.set_verbosity).handlers | pages
        self._listen_at("the metrics server", "FailedToStartMetricServer",
                        self.config.metrics_bind_address, metrics_routes(self.metrics, self.about))

    def _listen_at(self, name: str, reason: str, where: BindAddress, handler: Handler) -> None:
        def failed(error: OSError) -> None:
            problem = f"{name} can't listen on {where}: {error}"
            self.events.report_node("Warning", reason, problem)
            self.failures.append(problem)
            self.loop.stop()

        give_up = failed if self.config.bind_address_hard_fail else None
        self.server.listen(name, [where], handler, both_families=True, failed=give_up)

    def _need_restart(self) -> None:
        self.restart_needed.set()
        self.loop.stop()
