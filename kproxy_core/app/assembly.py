"""The running proxy, assembled from its parts."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kproxy_core import __version__
from kproxy_core.app import preparation
from kproxy_core.app.control import ControlServer, FollowedFile, answer_requests
from kproxy_core.app.family_checks import doubts, unservable
from kproxy_core.config.check import FEATURE_GATES
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import BindAddress, Config, effective, effective_flags
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.registry import Registry
from kproxy_core.kube.store import Store
from kproxy_core.linux import process, programs
from kproxy_core.linux.addresses import AddressWatch
from kproxy_core.linux.process import cpu_seconds
from kproxy_core.model.address import Family
from kproxy_core.model.events import Source
from kproxy_core.modes.choice import Choice, choose
from kproxy_core.modes.journal import Journal
from kproxy_core.modes.retirement import RetiringModes
from kproxy_core.modes.settings import (
    Configuration,
    StartFailed,
    backend_settings,
    node_settings,
    pacing,
    served_families,
    settings_of_modes,
    terms_of_modes,
)
from kproxy_core.modes.switch import ModeSwitch
from kproxy_core.modes.takeover import Takeover
from kproxy_core.observe import logs
from kproxy_core.observe.events import EventRecorder
from kproxy_core.observe.health import ProxyHealth, ServiceHealth
from kproxy_core.observe.history import ChangeLog, SyncHistory
from kproxy_core.observe.logs import innermost_calls
from kproxy_core.observe.messages import Handler
from kproxy_core.observe.metrics import Metrics, SyncMetrics
from kproxy_core.observe.pages import About, Debug, health_routes, metrics_routes
from kproxy_core.observe.server import HttpServer
from kproxy_core.sync.flows import CleanupResult, EarlyConnections, FlowCleaner, StaleFlowObserver
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeFacts
from kproxy_core.sync.observer import SyncObserver

if TYPE_CHECKING:
    from kproxy_core.app.answers import Inspection, Overview
    from kproxy_core.kube.access import CurrentAccess
    from kproxy_core.kube.requests import Observe
    from kproxy_core.observe.otlp import OtlpExporter
    from kproxy_core.observe.traffic import TrafficRecorder

# The end of the process after SIGTERM: soon, whatever a program or a server does.

log = logging.getLogger("kproxy.run")

PROGRAMS_END = 2.0
"""Seconds after a signal when running programs are killed."""
PROCESS_ENDS = 4.5
"""Seconds after a signal when the process exits, even if it is not done."""


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


# The export of the running proxy's metrics.

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def make_exporter(metrics: Metrics, node: str) -> "OtlpExporter | None":
    """Return the exporter that OpenTelemetry's variables of the environment ask for, if they do."""
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    attributes = {"service.name": "kproxy", "service.version": __version__, "k8s.node.name": node}
    problem = f"{variable} is set, but OpenTelemetry's exporter is not installed: pip install 'kproxy[otlp]'"
    try:
        from kproxy_core.observe.otlp import OtlpExporter

        return OtlpExporter(metrics.registry, attributes, __version__)
    except ImportError as error:
        if not (error.name or "").startswith("opentelemetry"):
            problem = f"{variable} is set, but {error}"
    except ValueError as error:
        problem = str(error)
    log.error("metrics are not pushed by OTLP", extra={"fields": {"because": problem}})
    return None


# Counting of connections in the running proxy.

def make_recorder(
    config: Config, families: Sequence[Family], instance: BackendInstance, metrics: Metrics
) -> "TrafficRecorder | None":
    """Return the recorder of connections, whose totals are in *metrics*; None if none are counted."""
    if not config.kproxy.count_traffic:
        return None
    from kproxy_core.observe.traffic import FrontendOwners, StoredTotals, TrafficCollector, TrafficRecorder

    # A scrape of 10,000 Services computes for 0.4 s. A sync that needs the interpreter waits this long.
    sys.setswitchinterval(0.0001)
    owners = FrontendOwners(families, time.monotonic)
    recorder = TrafficRecorder(
        families, instance, owners, StoredTotals(config.kproxy.state_directory), time.monotonic)
    metrics.registry.register(TrafficCollector(
        recorder, endpoints=config.kproxy.traffic_metrics == "endpoint", limit=config.kproxy.max_series))
    return recorder


def make_source(config: Config, node_name: str, access: "CurrentAccess", observe: "Observe") -> Source:
    """Return the source of objects: the API server of *access*, unless *config* names a directory.

    *observe* is called after each request to the API server. Raises StartFailed if the source cannot be used.
    """
    if config.kproxy.manifests:
        from kproxy_core.kube.directory import DirectorySource

        return DirectorySource(Path(config.kproxy.manifests), node_name)
    from kproxy_core.kube.access import AccessError
    from kproxy_core.kube.reflector import KubernetesSource
    from kproxy_core.kube.transport import JSON, accept_header

    client = config.client
    accept = accept_header(client.accept_content_types or JSON)
    if accept is None:
        log.info("unknown content type in clientConnection, requesting JSON",
                 extra={"fields": {"configured": client.accept_content_types}})
    try:
        return KubernetesSource(access, node_name, accept=accept or JSON, qps=client.qps, burst=client.burst,
                                observe=observe)
    except AccessError as error:
        raise StartFailed(str(error)) from error


def make_store(config: Config, families: tuple[Family, ...], source: Source) -> Store:
    external_ips = config.feature_gates.get("AllowServiceExternalIPs", True)
    return Store(families, source.kinds, time.time(), external_ips=external_ips)


def make_events(
    config: Config, node_name: str, access: "CurrentAccess", observe: "Observe"
) -> EventRecorder:
    """Return the recorder of cluster events; silent without an API server. *observe*: see `make_source`."""
    if config.kproxy.manifests:
        return EventRecorder(node_name, None)
    from kproxy_core.observe.event_writer import write_event

    host = socket.gethostname().strip().lower()
    return EventRecorder(node_name, partial(write_event, access, host, observe))


def about(config: Config, flags: Flags) -> About:
    return About(
        mode=config.mode,
        version=config.reported_version or __version__,
        configuration=effective(config),
        flags=effective_flags(flags),
        statusz=config.feature_gates.get("ComponentStatusz", True),
        flagz=config.feature_gates.get("ComponentFlagz", True),
        many_series=config.kproxy.count_traffic,
    )


def set_up(config: Config, registry: Registry, configuration: Configuration, access: "CurrentAccess") -> None:
    """Do everything that needs all privileges; `run` then needs fewer.

    Also prepares the `switch_modes` of the configuration. Raises BackendError, HostError or StartFailed for
    the mode that will serve; another mode's failure is only logged.
    """
    config, instance, _, families = choose(configuration, registry, config.mode, served_families())
    registry.close_backend(instance)
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


def run(config: Config, registry: Registry, configuration: Configuration, access: "CurrentAccess") -> None:
    """Run the proxy until SIGTERM, SIGINT or a change of the configuration file. *access*: the API server.

    Serves in the mode of *config* or its fallback, or without a mode in the best that works. The rules remain
    after the end, except those that redirect to this process. Raises BackendError, HostError or StartFailed.
    """
    preparation.tune_interpreter()
    preparation.protect_from_oom_killer(config.oom_score_adj)
    preparation.raise_file_limit()
    if config.mode == configuration.mode:
        Journal(config.kproxy.state_directory).clear()
    else:
        log.info("resuming earlier mode switch", extra={
            "fields": {"configured": configuration.mode, "mode": config.mode}})
    choice = choose(configuration, registry, config.mode, served_families())
    if problem := unservable(choice.config, choice.families):
        raise StartFailed(problem)
    _Proxy(choice, registry, configuration, access).run()
    log.info("stopped")


class _Proxy:
    def __init__(
        self, choice: Choice, registry: Registry, configuration: Configuration, access: "CurrentAccess",
    ) -> None:
        """Make all parts without starting them. Raises StartFailed."""
        config, instance, fallback, families = choice
        self._config = config
        self._registry = registry
        self._configuration = configuration
        self._families = families
        self._node = node_settings(config, registry.load(config.mode))
        log.info("starting", extra={"fields": {
            "version": __version__, "mode": config.mode, "node": self._node.name,
            "families": ",".join(family.label for family in families),
        }})
        log.debug("flags", extra={"fields": configuration.flags})
        journal = Journal(config.kproxy.state_directory)
        self._metrics = Metrics(config.mode, __version__)
        self._sync_metrics = SyncMetrics(self._metrics.registry, config.mode, families, time.time)
        for name, enabled in config.feature_gates.items():
            self._metrics.set_gate(name, FEATURE_GATES[name].stage, enabled)
        self._health = ProxyHealth(
            families, timeout=2 * config.sync_period, node_required=not config.kproxy.manifests)
        self._health.hold("other modes' leftovers have not been removed yet")
        self._source = make_source(config, self._node.name, access, self._metrics.client.record)
        self._store = make_store(config, families, self._source)
        self._events = make_events(config, self._node.name, access, self._metrics.client.record)
        self._events.report_node("Normal", "Starting")
        self._told = about(config, configuration.flags)
        if fallback is not None:
            self._metrics.set_fallback(fallback.wanted, fallback.serving)
            self._events.report_node("Warning", "ModeFallback", str(fallback))
            self._told.fallback = fallback
        self._limits = preparation.limits(config)
        self._privileged = "CAP_NET_ADMIN" in process.held()
        if not self._privileged:
            log.info("without CAP_NET_ADMIN, leftovers and conntrack entries are not touched")
        self._tuned = not self._privileged or preparation.tune_conntrack(self._limits, self._events)
        self._server = HttpServer()
        self._traffic = make_recorder(config, families, instance, self._metrics)
        self._exporter = make_exporter(self._metrics, self._node.name)
        self._history = SyncHistory() if config.enable_profiling else None
        self._loop = Loop(
            families, self._store, NodeFacts(self._node, frozenset()), instance, self._observers(),
            pacing=lambda: pacing(config), clock=time.monotonic, cpu=cpu_seconds, all_synced=self._all_synced)
        self._settings_of = settings_of_modes(configuration, families)
        self._terms = terms_of_modes(configuration, registry, families)
        self._retiring = RetiringModes(
            registry, self._settings_of, config.mode, preparation.return_freed_memory)
        self._switch = ModeSwitch(
            self._loop, registry, self._retiring, journal, instance=instance, configured=configuration.mode,
            terms=self._terms, mode_changed=self._mode_changed)
        self._takeover = Takeover(registry, self._settings_of, self._switch, self._retiring, self._health)
        self._metrics.add_collector(lambda: [
            *self._switch.instance.measure(), self._retiring.measure(), registry.calls.measure()])
        self._overview = cache(self._make_overview)
        self._inspection = cache(self._make_inspection)
        self._failures: list[str] = []

    def _make_inspection(self) -> "Inspection":
        from kproxy_core.app.answers import Inspection  # a start needs none of what it imports

        return Inspection(
            self._loop, self._registry, self._switch, settings_of=self._settings_of, terms=self._terms,
            store=self._store, about=self._about)

    def _make_overview(self) -> "Overview":
        from kproxy_core.app.answers import Overview  # nor this

        return Overview(self._loop, self._health, self._told, self._history, self._traffic, self._node.name)

    def _observers(self) -> list[SyncObserver]:
        failed = partial(self._events.report_service, "FailedToStartServiceHealthcheck")
        observers: list[SyncObserver] = [
            self._health,
            *(ServiceHealth(family, self._server, self._health.healthy, failed)
              for family in self._families),
            self._sync_metrics,
            ChangeLog(),
        ]
        if self._traffic is not None:
            observers.append(self._traffic.owners)
        if self._history is not None:
            observers.append(self._history)
        if self._privileged:
            flows = StaleFlowObserver(self._families, FlowCleaner(self._flows_cleaned).clean)
            self._finish_flows = flows.finish
            observers += [flows, EarlyConnections(self._sync_metrics.record_cleanup)]
        observers.append(preparation.FreedMemory())
        return observers

    def _flows_cleaned(self, result: CleanupResult) -> None:
        if result.deleted is not None:
            self._sync_metrics.record_cleanup(result.family, result.deleted, result.seconds)
        self._loop.post(partial(self._finish_flows, result))

    def run(self) -> None:
        """Run until a signal. Raises StartFailed if a restart is needed."""
        self._listen()
        watcher = AddressWatch(self._loop.set_addresses, self._registry.is_of_node)
        self._loop.set_addresses(watcher.addresses)
        stop_on_signals(self._loop.stop)
        followed = FollowedFile(
            self._configuration, self._switch, self._events,
            partial(self._end, "the content of the configuration file has changed: a restart is needed"))
        control = ControlServer(answer_requests(self._switch, self._inspection, self._overview))
        control.start()
        self._source.start(self._loop.emit)
        if self._exporter is not None:
            self._exporter.start()
        try:
            self._loop.run()
        finally:
            control.stop()
            self._takeover.stop()
            followed.close()
            self._source.stop()
            self._events.close()
            watcher.close()
            self._server.stop()
            if self._exporter is not None:
                self._exporter.stop()
            if self._traffic is not None:
                self._traffic.stop()
            self._retiring.close()
            self._registry.close_backend(self._switch.instance)
        if self._failures:
            raise StartFailed("; ".join(self._failures))

    def _about(self) -> Mapping[str, Any]:
        metrics, _ = self._metrics.exposition()
        return {
            "configuration": self._told.configuration, "metrics": metrics.decode().splitlines(),
            "log": logs.recent_lines(),
        }  # fmt: skip

    def _listen(self) -> None:
        self._server.start()
        if self._config.healthz_bind_address is not None:
            self._listen_at("the health server", "FailedToStartProxierHealthcheck",
                            self._config.healthz_bind_address, health_routes(self._health, self._metrics))
        if self._config.enable_profiling:
            from kproxy_core.app.answers import explain_or_problem
            from kproxy_core.observe.pages import page_handlers

            overview = self._overview()
            pages = page_handlers(
                overview.status, overview.services, partial(explain_or_problem, self._inspection))
            self._told.debug = Debug(logs.set_verbosity).handlers | pages
        self._listen_at("the metrics server", "FailedToStartMetricServer",
                        self._config.metrics_bind_address, metrics_routes(self._metrics, self._told))

    def _listen_at(self, name: str, reason: str, where: BindAddress, handler: Handler) -> None:
        def failed(error: OSError) -> None:
            problem = f"{name} can't listen on {where}: {error}"
            self._events.report_node("Warning", reason, problem)
            self._end(problem)

        give_up = failed if self._config.bind_address_hard_fail else None
        self._server.listen(name, [where], handler, both_families=True, failed=give_up)

    def _end(self, because: str) -> None:
        self._failures.append(because)
        self._loop.stop()

    def _all_synced(self) -> None:
        """Finish the start, once every family is in sync."""
        preparation.settle_memory()
        if self._traffic is not None:
            self._traffic.start()
        if not self._tuned and not preparation.tune_conntrack(self._limits, self._events):
            log.warning("the kernel does not track connections; their limits and timeouts are not set")
        if self._privileged:
            for doubt in doubts(self._config, self._node, self._families, self._store.node):
                log.warning("suspicious configuration", extra={"fields": {"because": doubt}})
            self._takeover.start()
        else:
            self._health.release()
        self._events.start()

    def _mode_changed(self, instance: BackendInstance) -> None:
        if self._traffic is not None:
            layers = map(self._registry.layers, (self._told.mode, instance.mode))
            self._traffic.switched(instance, shares=len({layer[0] for layer in layers}) == 1)
        self._metrics.set_mode(instance.mode)
        self._sync_metrics.set_mode(instance.mode)
        self._told.configuration = effective(self._configuration.of(instance.mode))
        self._told.mode = instance.mode  # After everything that others read once they have seen it.
        self._events.report_node("Normal", "ModeSwitched", instance.mode)
