"""The running proxy, assembled from its parts."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kproxy_core import __version__
from kproxy_core.app import preparation
from kproxy_core.app.control import ControlServer
from kproxy_core.app.errors import Misused, NoAnswer, RequestRefused, RestartNeeded
from kproxy_core.app.family_checks import doubts, unservable
from kproxy_core.app.notify import Heartbeat, ServiceManager
from kproxy_core.app.requests import (
    Answer,
    Compare,
    Diff,
    Explain,
    Plans,
    Report,
    Request,
    Status,
    Switch,
    Targets,
    Top,
    parse_texts,
)
from kproxy_core.config.check import FEATURE_GATES
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import BindAddress, Config, effective, effective_flags
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.registry import Registry, UnknownMode
from kproxy_core.contract.values import Fallback
from kproxy_core.kube.store import Store
from kproxy_core.linux import process, programs
from kproxy_core.linux.addresses import AddressWatch
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
from kproxy_core.modes.switch import ModeSwitch, ReportProgress, SwitchFailed
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
from kproxy_core.sync.node_facts import NodeFacts
from kproxy_core.sync.node_port_relays import NodePortRelays, by_timer
from kproxy_core.sync.observer import SyncObserver
from kproxy_core.sync.resets import ConnectionResets, ResetResult

if TYPE_CHECKING:
    from kproxy_core.app.answers import Answers
    from kproxy_core.app.overview import Overview
    from kproxy_core.kube.access import CurrentAccess
    from kproxy_core.kube.requests import Observe
    from kproxy_core.observe.traffic import TrafficRecorder

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
    from kproxy_core.observe.traffic import FrontendOwners, StoredTotals, TrafficCollector, TrafficRecorder

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
    _Proxy(chosen, registry, configuration, access, manager).run()
    log.info("stopped")


class _Proxy:
    def __init__(
        self, chosen: ChosenMode, registry: Registry, configuration: Configuration, access: "CurrentAccess",
        manager: ServiceManager,
    ) -> None:
        """Make all parts without starting them. Raises StartFailed."""
        config, instance, fallback, families = chosen
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
        self._relays = NodePortRelays(
            lambda service, problem: self._events.report_service(
                "FailedToListenOnNodePort", service, problem),
            lambda family, problem: self._health.report("node ports on localhost", family, problem),
            self._post, by_timer(self._post),
            lambda backend: backend is self._switch.instance)
        registry.syncing, registry.synced = self._relays.prepare, self._relays.follow
        self._health = ProxyHealth(
            families, timeout=2 * config.sync_period, node_required=not config.kproxy.manifests)
        self._health.hold("other modes' leftovers have not been removed yet")
        self._source = make_source(
            config, self._node.name, access, self._metrics.client.record,
            lambda problem: self._health.report("manifests", None, problem))
        if config.kproxy.manifests:
            from kproxy_core.kube.checks import CheckedSource

            checked = self._source = CheckedSource(self._source)
            self._metrics.add_collector(lambda: [tuple(measure_checks(checked.results()))])
        self._store = make_store(config, families, self._source)
        self._events = make_events(config, self._node.name, access, self._metrics.client.record)
        self._events.report_node("Normal", "Starting")
        self._health.include("objects", lambda: map(str, self._source.problems()))
        self._about = make_about(config, configuration.flags)
        if fallback is not None:
            self._fell_back(fallback)
        self._limits = preparation.limits(config)
        self._privileged = "CAP_NET_ADMIN" in process.network_privileges()
        if not self._privileged:
            log.info("without CAP_NET_ADMIN, leftovers and conntrack entries are not touched")
        self._tuned = not self._privileged or preparation.tune_conntrack(self._limits, self._events)
        self._server = HttpServer()
        self._health.include("listeners", self._server.problems)
        self._metrics.add_collector(lambda: [tuple(measure_problems(self._health.all_problems()))])
        self._traffic = make_recorder(config, families, instance, self._metrics)
        self._history = SyncHistory() if config.enable_profiling else None
        self._unserved = UnservedServices(partial(self._events.report_service, "FailedToProgram"))
        self._endpoint_health = EndpointHealth(self._quarantine, partial(
            self._events.report_service, "EndpointInQuarantine", action="ChooseEndpoints"),
            count_refusals=config.kproxy.count_refusals)
        self._loop = Loop(
            families, self._store, NodeFacts(self._node, frozenset()), instance, self._observers(),
            pacing=lambda: pacing(config), clock=time.monotonic, cpu=cpu_seconds, all_synced=self._all_synced)
        self._heartbeat = Heartbeat(
            manager, self._loop.post, prepare=self._health.all_problems, status=self._status,
            alive=self._health.alive)
        self._settings_of = settings_of_modes(configuration, families)
        self._mode_settings = partial(mode_settings, configuration, registry, families)
        self._retiring = RetiringModes(
            registry, self._settings_of, config.mode, preparation.return_freed_memory)
        self._switch = ModeSwitch(
            self._loop, registry, self._retiring, journal, instance=instance, configured=configuration.mode,
            mode_settings=self._mode_settings, mode_changed=self._mode_changed,
            reason=entry.reason if (entry := journal.read()) is not None else Reason.CONFIGURATION)
        self._desired = DesiredMode(
            self._switch, self._events, self._health, key=config.kproxy.mode_from_node_label,
            modes=registry.modes, conclude=partial(conclude, configuration, registry, families),
            fell_back=self._fell_back)
        self._takeover = Takeover(registry, self._settings_of, self._switch, self._retiring, self._health)
        self._metrics.add_collector(lambda: [
            *self._switch.instance.measure(), self._retiring.measure(), self._relays.measure(),
            registry.calls.measure(), self._endpoint_health.measure(), self._unserved.measure()])
        self._answers = cache(self._make_answers)
        self._overview = cache(self._make_overview)
        self._failures: list[str] = []
        self._restart_needed = False

    def _post(self, call: Callable[[], None]) -> None:
        self._loop.post(call)

    def _make_answers(self) -> "Answers":
        from kproxy_core.app.answers import Answers  # a start needs none of what it imports

        return Answers(self._loop, self._registry, self._switch, self._store,
                       settings_of=self._settings_of, mode_settings=self._mode_settings,
                       relay_problem=self._relays.problem)

    def _make_overview(self) -> "Overview":
        from kproxy_core.app.overview import Overview  # nor this

        return Overview(self._loop, self._health, self._source.problems, self._about, self._history,
                        self._traffic, self._node.name,
                        lambda: {"configured": self._switch.configured, "before": self._switch.before,
                                 "label": self._desired.named_by})

    def _observers(self) -> list[SyncObserver]:
        failed = partial(self._events.report_service, "FailedToStartServiceHealthcheck")
        observers: list[SyncObserver] = [
            self._health,
            *(ServiceHealth(family, self._server, self._health.healthy, failed)
              for family in self._families),
            self._sync_metrics,
            LastResortReports(partial(self._events.report_service, "LastResort", action="ChooseEndpoints")),
            ChangeLog(),
        ]
        if self._traffic is not None:
            observers.append(self._traffic.owners)
        if self._history is not None:
            observers.append(self._history)
        if self._privileged:
            observers += [
                self._stale_flows(), EarlyConnections(self._sync_metrics.record_cleanup),
                ConnectionResets(
                    self._families, self._connections_reset, relayed=self._relays.reset_connections),
                self._endpoint_health,
            ]
        if key := self._config.kproxy.mode_from_node_label:
            observers.append(NodeLabel(key, lambda label: self._desired.set_label(label)))
        observers += [self._unserved, preparation.FreedMemory()]
        return observers

    def _quarantine(self, endpoints: Quarantined, services: Collection[ServiceName]) -> None:
        self._loop.post(partial(self._loop.set_quarantined, endpoints, services))

    def _stale_flows(self) -> StaleFlowObserver:
        """Return an observer whose flows a thread deletes, and whose results are handled on the loop's."""
        def cleaned(result: CleanupResult) -> None:
            if result.deleted is not None:
                self._sync_metrics.record_cleanup(result.family, result.deleted, result.seconds)
            self._loop.post(partial(observer.finish, result))

        observer = StaleFlowObserver(self._families, FlowCleaner(cleaned).clean)
        return observer

    def _connections_reset(self, result: ResetResult) -> None:
        self._sync_metrics.record_resets(result)
        self._health.report("connections to removed endpoints", result.family, result.problem)

    def run(self) -> None:
        """Run until a signal or a change of the configuration file. Raises StartFailed or RestartNeeded."""
        with ExitStack() as parts:
            self._start(parts)
            self._loop.run()
        if self._failures:
            raise StartFailed("; ".join(self._failures))
        if self._restart_needed:
            raise RestartNeeded("the content of the configuration file has changed: a restart is needed")

    def _start(self, parts: ExitStack) -> None:
        """Start all parts of the process but the loop. Have *parts* stop them in the opposite order.

        Backends are closed last: the other parts measure them, read their counts and change modes.
        """
        parts.callback(self._relays.close)
        parts.callback(lambda: self._switch.instance.close())
        parts.callback(self._retiring.close)
        if self._traffic is not None:
            parts.callback(self._traffic.stop)
        parts.callback(self._server.stop)
        self._server.start()
        self._listen()
        watcher = AddressWatch(self._loop.set_addresses, self._registry.is_of_node)
        parts.callback(watcher.close)
        self._loop.set_addresses(watcher.addresses)
        stop_on_signals(self._loop.stop)
        parts.callback(self._events.close)
        self._source.start(self._loop.emit)
        parts.callback(self._source.stop)
        followed = FollowedFile(self._configuration, self._switch, self._desired, self._need_restart)
        parts.callback(followed.close)
        parts.callback(self._desired.close)
        parts.callback(self._takeover.stop)
        control = ControlServer(self._answer)
        parts.callback(control.stop)
        control.start()
        parts.callback(self._endpoint_health.stop)
        parts.callback(self._heartbeat.stop)
        self._heartbeat.start()

    # Requests --------------------------------------------------------------------------------

    def _answer(self, request: Request, report_progress: ReportProgress) -> Answer:
        """Fulfil a request of the control socket or of the page. Raises RequestRefused."""
        try:
            match request:
                case Switch(mode=mode):
                    self._registry.check_mode(mode)
                    self._desired.switch_by_hand(mode, report_progress)
                    return {"mode": self._switch.instance.mode, "configured": self._switch.configured,
                            "label": self._desired.named_by}
                case Compare(mode=mode):
                    self._registry.check_mode(mode)
                    self._desired.permit(mode)
                    return self._answers().compare(request)
                case Explain():
                    return self._answers().explain(request)
                case Diff():
                    return self._answers().diff()
                case Targets():
                    return self._answers().targets(request)
                case Report():
                    return {**self._answers().report(), **self._own_report()}
                case Plans():
                    return self._answers().plans()
                case Status():
                    return self._overview().condition()
                case Top():
                    return {"status": self._overview().status(), **self._overview().services(request)}
        except Misused:
            raise
        except UnknownMode as error:
            raise Misused(str(error)) from error
        except (BackendError, NoAnswer, SwitchFailed) as error:
            raise RequestRefused(str(error)) from error

    def _answer_page(self, kind: type[Explain] | type[Top], given: Mapping[str, str]) -> Answer:
        """Answer the page's question with the fields *given*. A refusal is in ``problem``."""
        try:
            return self._answer(parse_texts(kind, given), log.debug)
        except RequestRefused as error:
            return {"problem": str(error)}

    def _own_report(self) -> Mapping[str, Any]:
        """Return the fields of a report about this process."""
        metrics, _ = self._metrics.exposition()
        return {
            "configuration": self._about.configuration, "metrics": metrics.decode().splitlines(),
            "log": logs.recent_lines(),
        }  # fmt: skip

    # Servers ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._config.healthz_bind_address is not None:
            self._listen_at("the health server", "FailedToStartProxierHealthcheck",
                            self._config.healthz_bind_address, health_routes(self._health, self._metrics))
        if self._config.enable_profiling:
            from kproxy_core.observe.pages import page_handlers

            pages = page_handlers(
                lambda: self._overview().status(), partial(self._answer_page, Top),
                partial(self._answer_page, Explain))
            self._about.debug = Debug(logs.set_verbosity).handlers | pages
        self._listen_at("the metrics server", "FailedToStartMetricServer",
                        self._config.metrics_bind_address, metrics_routes(self._metrics, self._about))

    def _listen_at(self, name: str, reason: str, where: BindAddress, handler: Handler) -> None:
        def failed(error: OSError) -> None:
            problem = f"{name} can't listen on {where}: {error}"
            self._events.report_node("Warning", reason, problem)
            self._failures.append(problem)
            self._loop.stop()

        give_up = failed if self._config.bind_address_hard_fail else None
        self._server.listen(name, [where], handler, both_families=True, failed=give_up)

    # Events of the parts ---------------------------------------------------------------------

    def _need_restart(self) -> None:
        self._restart_needed = True
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
            self._warn_of_unaddressed(self._switch.instance)
            self._takeover.start()
        else:
            self._health.release()
        self._events.start()
        self._desired.start()
        self._heartbeat.set_ready()

    def _status(self) -> str:
        """Return this process's state in one line, for systemd."""
        problems = "; ".join(self._health.last_problems())
        return f"mode {self._about.mode}: {problems or f'{len(self._store.services)} Services'}"

    def _fell_back(self, fallback: Fallback) -> None:
        self._metrics.set_fallback(fallback.wanted, fallback.serving)
        self._events.report_node("Warning", "ModeFallback", str(fallback))
        self._about.fallback = fallback
        self._show_fallback(self._about.mode)

    def _show_fallback(self, serving: str) -> None:
        self._health.report("mode", None, str(self._about.fallback_to(serving) or ""))

    def _warn_of_unaddressed(self, instance: BackendInstance) -> None:
        preparation.warn_of_unaddressed(instance.mode, self._families, instance.needs_interface_addresses)

    def _mode_changed(self, instance: BackendInstance) -> None:
        self._loop.post(partial(self._relays.settle, instance))
        if self._traffic is not None:
            layers = map(self._registry.layers, (self._about.mode, instance.mode))
            self._traffic.switched(instance, shares=len({layer[0] for layer in layers}) == 1)
        self._show_fallback(instance.mode)
        self._metrics.set_mode(instance.mode)
        self._sync_metrics.set_mode(instance.mode)
        self._about.configuration = effective(self._configuration.of(instance.mode))
        self._about.mode = instance.mode  # After everything that others read once they have seen it.
        self._events.report_node("Normal", "ModeSwitched", instance.mode)
        self._warn_of_unaddressed(instance)
        self._loop.post(self._heartbeat.beat)
