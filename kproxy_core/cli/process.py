"""The running proxy, put together: configuration in, threads and loop out."""

import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kproxy_core import __version__
from kproxy_core.backend.api import BackendSettings, Description
from kproxy_core.backend.registry import Registry
from kproxy_core.config import BindAddress, Config, DetectLocalMode, parse_node_port_addresses
from kproxy_core.configfile import ClientConnection
from kproxy_core.host.addresses import default_source_address, watch_addresses
from kproxy_core.model.address import Cidr, Family
from kproxy_core.model.node import LocalSource
from kproxy_core.run import logs
from kproxy_core.run.client_metrics import ClientMetrics
from kproxy_core.run.debug import Debug
from kproxy_core.run.family_sync import Shared
from kproxy_core.run.flows import FlowCleaner
from kproxy_core.run.health import ProxyHealth
from kproxy_core.run.http import HttpServer
from kproxy_core.run.http_messages import Handler
from kproxy_core.run.leftovers import clean_up_in_background
from kproxy_core.run.loop import Loop
from kproxy_core.run.metrics import Metrics
from kproxy_core.run.node_facts import NodeFacts, NodeSettings
from kproxy_core.run.pacing import Pacing
from kproxy_core.run.routes import About, health_routes, metrics_routes
from kproxy_core.run.service_health import ServiceHealth
from kproxy_core.sources.events import Source
from kproxy_core.sources.store import Store

log = logging.getLogger("kproxy.run")


class StartFailed(Exception):
    """What was asked for can't be had; one line for the operator."""


def served_families() -> tuple[Family, ...]:
    """The IP families of this machine, as kube-proxy judges them; IPv4 is always there."""
    interfaces = Path("/proc/net/if_inet6")
    disabled = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    try:
        if interfaces.exists() and disabled.read_text(encoding="ascii").strip() != "1":
            return (Family.IPV4, Family.IPV6)
    except OSError:
        pass
    return (Family.IPV4,)


def backend_settings(config: Config, families: tuple[Family, ...]) -> BackendSettings:
    """What a backend is made with."""
    return BackendSettings(families, config.masquerade_bit, config.backend_options)


def node_settings(config: Config, description: Description) -> NodeSettings:
    """What the operator, or else the mode, decides about the node."""
    node_ports = config.node_port_addresses
    if node_ports == ():
        node_ports = parse_node_port_addresses(description.default_node_port_addresses)
    return NodeSettings(
        name=config.hostname_override or socket.gethostname().strip().lower(),
        local=_local(config),
        node_ports=node_ports,
        bind_address=config.bind_address if any(config.bind_address) else None,
        guess_address=default_source_address if config.manifests else None,
        masquerade_all=config.masquerade_all,
        masquerade_bit=config.masquerade_bit,
    )


def make_source(config: Config, node_name: str, counted: ClientMetrics) -> Source:
    """Where Services come from; requests to an API server are *counted*.

    Raises StartFailed if that can't be.
    """
    if config.manifests:
        from kproxy_core.sources.directory import DirectorySource

        return DirectorySource(Path(config.manifests), node_name)
    from kproxy_core.sources.access import AccessError
    from kproxy_core.sources.api_requests import ApiRequest
    from kproxy_core.sources.http import CONTENT_TYPE
    from kproxy_core.sources.kubernetes import KubernetesSource

    def observe(request: ApiRequest) -> None:
        counted.requested("GET", request.host, request.code, waited=request.waited,
                          seconds=request.seconds, received=request.received)

    client, usual = config.client, ClientConnection()
    for wanted in {client.content_type, client.accept_content_types} - {CONTENT_TYPE, usual.content_type, ""}:
        log.info("the API server is asked for JSON, whatever clientConnection says",
                 extra={"fields": {"configured": wanted}})
    try:
        return KubernetesSource(config.master, client.kubeconfig, node_name,
                                qps=client.qps, burst=client.burst, observe=observe)
    except AccessError as error:
        raise StartFailed(str(error)) from error


def make_store(config: Config, families: tuple[Family, ...], source: Source) -> Store:
    """Where all that *source* delivers is kept."""
    external_ips = config.feature_gates.get("AllowServiceExternalIPs", True)
    return Store(families, source.kinds, time.time(), external_ips=external_ips)


def about(config: Config) -> About:
    """What the metrics server tells besides metrics."""
    return About(
        mode=config.mode,
        version=__version__,
        statusz=config.feature_gates.get("ComponentStatusz", True),
        flagz=config.feature_gates.get("ComponentFlagz", True),
        debug=Debug(logs.set_verbosity) if config.enable_profiling else None,
    )


def run(config: Config, registry: Registry) -> None:
    """Be the proxy until SIGTERM or SIGINT; the rules stay.

    Raises BackendError, HostError or StartFailed.
    """
    _tune_interpreter()
    _protect_from_oom_killer(config.oom_score_adj)
    families = served_families()
    settings = node_settings(config, registry.load(config.mode))
    log.info("starting", extra={"fields": {
        "version": __version__, "mode": config.mode, "node": settings.name,
        "families": ",".join(family.label for family in families),
    }})
    registry.make_backend(config.mode, backend_settings(config, families))
    hook = registry.manager.hook

    metrics = Metrics(config.mode, __version__)
    metrics.also(hook.kproxy_measure)
    health = ProxyHealth(families, timeout=2 * config.sync_period, node_required=not config.manifests)
    health.hold("what other modes left has not been removed yet")
    source = make_source(config, settings.name, metrics.client)
    server = HttpServer()

    def all_synced() -> None:
        _settle_memory()
        clean_up_in_background(registry, config.mode, health)

    loop = Loop(
        families,
        make_store(config, families, source),
        NodeFacts(settings, frozenset()),
        Shared(
            hook=hook, health=health, metrics=metrics, cleaner=FlowCleaner(lambda done: loop.cleaned(done)),
            clock=time.monotonic, wall=time.time,
        ),
        pacing=lambda: Pacing(min_interval=config.min_sync_period, retry_cap=config.sync_period),
        service_health=lambda: ServiceHealth(server, health.healthy),
        all_synced=all_synced,
    )
    failures: list[str] = []

    def listen(name: str, where: BindAddress, handler: Handler) -> None:
        def failed(error: OSError) -> None:
            failures.append(f"{name} can't listen on {where}: {error}")
            loop.stop()

        give_up = failed if config.bind_address_hard_fail else None
        server.listen(name, [where], handler, both_families=True, failed=give_up)

    server.start()
    listen("the health server", config.healthz_bind_address, health_routes(health, metrics))
    listen("the metrics server", config.metrics_bind_address, metrics_routes(metrics, about(config)))
    watcher = watch_addresses(loop.addresses_are)
    loop.addresses_are(watcher.addresses)
    _stop_on_signals(loop.stop)
    source.start(loop.emit)
    try:
        loop.run()
    finally:
        source.stop()
        watcher.close()
        server.stop()
        hook.kproxy_close()
    if failures:
        raise StartFailed("; ".join(failures))
    log.info("stopped; the rules stay in place")


def _local(config: Config) -> LocalSource | tuple[Cidr, ...] | None:
    match config.detect_local_mode:
        case DetectLocalMode.CLUSTER_CIDR:
            return config.cluster_cidrs
        case DetectLocalMode.NODE_CIDR:
            return None
        case DetectLocalMode.BRIDGE_INTERFACE:
            return LocalSource(interface=config.bridge_interface)
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return LocalSource(interface_prefix=config.interface_name_prefix)


def _tune_interpreter() -> None:
    """Let a change get from its watch to the loop at once, and memory alone until the first sync is done."""
    # A thread that wants to run asks for the interpreter's lock only after this long. The default is
    # 5 ms, longer than everything else between a change and its rules together.
    sys.setswitchinterval(0.0005)
    # What comes in at the start stays. Looking through it again and again for cycles would find none
    # and takes longer than the first sync itself.
    gc.disable()


def _settle_memory() -> None:
    """What lives after the first sync mostly lives on: take it out of the collector's sight."""
    gc.collect()
    gc.freeze()
    # Values are freed by their reference counts; cycles come from rare exceptions only.
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def _protect_from_oom_killer(score: int) -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score), encoding="ascii")
    except OSError as error:
        log.info("oom_score_adj stays as it is", extra={"fields": {"wanted": score, "error": str(error)}})


def _stop_on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
