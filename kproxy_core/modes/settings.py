"""What the operator configured, and the settings with which a mode serves on this machine."""

import socket
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from kproxy_core.config.file import FileConfig, load
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import Config, DetectLocalMode, parse_node_port_addresses, resolve
from kproxy_core.contract.errors import InvalidOption, Unsupported
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Description
from kproxy_core.linux.addresses import default_source_address
from kproxy_core.model.address import Cidr, Family
from kproxy_core.model.near_names import did_you_mean
from kproxy_core.model.node import LocalSource
from kproxy_core.plan.service_plan import includes_loopback
from kproxy_core.sync.node_facts import NodeSettings
from kproxy_core.sync.pacing import Pacing


class StartFailed(Exception):
    """The proxy cannot start as requested; one line for the operator."""


class Configuration:
    """The flags and the file, resolved for each mode."""

    def __init__(self, flags: Flags, file: FileConfig | None) -> None:
        self.flags = flags
        self.file = file
        self._configs: dict[str, Config] = {}

    @classmethod
    def read(cls, flags: Flags) -> "Configuration":
        """Read the file that *flags* name, if any. Raises ConfigError."""
        return cls(flags, load(flags["config"]) if flags.get("config") else None)

    @property
    def asked(self) -> Config:
        """The configuration as given, with or without a mode. Raises ConfigError."""
        return resolve(self.flags, self.file)

    @property
    def mode(self) -> str:
        """The requested mode; "": the best that works. Raises ConfigError."""
        return self.asked.mode

    def of(self, mode: str) -> Config:
        """Return the effective configuration of *mode*, which is cached. Raises ConfigError."""
        config = self._configs.get(mode)
        if config is None:
            # Also for modes that only have leftovers here, and may not serve.
            config = self._configs[mode] = resolve(Flags(self.flags, mode=mode), self.file, serves=False)
        return config

    def follow(self, file: FileConfig) -> None:
        """Replace the file by its new content."""
        self.file = file
        self._configs = {}


class ModeSettings(Struct, frozen=True, kw_only=True):
    """Everything that is set for one mode while it serves."""

    backend: BackendSettings
    node: NodeSettings
    pacing: Callable[[], Pacing]


def served_families() -> tuple[Family, ...]:
    """Return the IP families of this machine by kube-proxy's rules, which always include IPv4."""
    interfaces = Path("/proc/net/if_inet6")
    disabled = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    try:
        if interfaces.exists() and disabled.read_text(encoding="ascii").strip() != "1":
            return (Family.IPV4, Family.IPV6)
    except OSError:
        pass
    return (Family.IPV4,)


def backend_settings(config: Config, families: tuple[Family, ...]) -> BackendSettings:
    loopback = tuple(f for f in families if includes_loopback(config.node_port_addresses, f))
    return BackendSettings(
        families, config.masquerade_bit, config.backend_options, loopback,
        count_traffic=config.kproxy.count_traffic, own_tables=config.kproxy.own_tables == "auto",
        sources=config.option_sources,
    )  # fmt: skip


def serving_settings(config: Config, registry: Registry, families: tuple[Family, ...]) -> BackendSettings:
    """Return the settings for the backend of a mode that will serve, or whose use is being considered.

    Raises Unsupported if a feature gate forbids it, InvalidOption for an option that neither the mode nor its
    base has, UnknownMode or PluginRefused.
    """
    if config.missing_gate:
        raise Unsupported(f"the feature gate {config.missing_gate} is off")
    settings = backend_settings(config, families)
    known = registry.options(config.mode)
    for name, value in config.kproxy.backend_options.get(config.mode, {}).items():
        if known is not None and name not in known:
            hint = did_you_mean(name, known)
            raise InvalidOption(settings, name, value, f"mode {config.mode} has no such option{hint}")
    return settings


def settings_of_modes(
    configuration: Configuration, families: tuple[Family, ...]
) -> Callable[[str], BackendSettings]:
    return lambda mode: backend_settings(configuration.of(mode), families)


def node_settings(config: Config, description: Description) -> NodeSettings:
    """Return the node's settings of the operator, else the mode's. Raises StartFailed without a node name."""
    node_ports = config.node_port_addresses
    if node_ports == ():
        node_ports = parse_node_port_addresses(description.default_node_port_addresses)
    name = config.hostname_override or socket.gethostname().strip().lower()
    if not name:
        raise StartFailed("this machine has no host name; give the node's with --hostname-override")
    return NodeSettings(
        name=name,
        local=_local(config),
        node_ports=node_ports,
        may_relay=config.may_relay_node_ports,
        bind_address=config.bind_address if any(config.bind_address) else None,
        guess_address=default_source_address if config.kproxy.manifests else None,
        masquerade_all=config.masquerade_all,
        masquerade_bit=config.masquerade_bit,
        removed_endpoints=config.kproxy.removed_endpoints,
    )


def pacing(config: Config) -> Pacing:
    return Pacing(min_interval=config.min_sync_period, retry_cap=config.sync_period)


def mode_settings(
    configuration: Configuration, registry: Registry, families: tuple[Family, ...], mode: str
) -> ModeSettings:
    """Return the settings of *mode*. Raises as `serving_settings` and `node_settings`, and ConfigError."""
    config = configuration.of(mode)
    return ModeSettings(
        backend=serving_settings(config, registry, families),
        node=node_settings(config, registry.load(mode)),
        pacing=lambda: pacing(config),
    )


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
