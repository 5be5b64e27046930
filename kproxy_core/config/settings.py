"""The effective configuration: flags and file as one frozen Config. Errors name the option."""

import enum
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from kproxy_core.config.check import OUTSIDE_SECTIONS, field_at, gates_in_effect, notices_about, problems_of
from kproxy_core.config.file import (
    ClientConnection,
    ConfigError,
    Conntrack,
    FileConfig,
    Kproxy,
    KubeProxyConfiguration,
    Problem,
)
from kproxy_core.config.flags import Flags
from kproxy_core.config.merge import merge
from kproxy_core.model.address import Address, Cidr, format_socket, parse_address, parse_cidr
from kproxy_core.model.duration import DefaultDuration
from kproxy_core.model.node import LONGEST_INTERFACE, NodePortAddresses, is_interface_name


class DetectLocalMode(enum.Enum):
    """The way to recognise traffic of this node's pods."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class BindAddress(NamedTuple):
    """An address and TCP port that a server of this process listens on."""

    address: Address
    port: int

    def __str__(self) -> str:
        return format_socket(self.address, self.port)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, checked. Periods in seconds."""

    mode: str
    """"": the preferred usable mode."""
    hostname_override: str
    """Trimmed and in lower case; "": the machine's name."""
    master: str
    bind_address: Address
    """Overrides the detected node address unless unspecified; nothing listens on it."""
    healthz_bind_address: BindAddress | None
    """None: no health server."""
    metrics_bind_address: BindAddress
    bind_address_hard_fail: bool
    enable_profiling: bool
    detect_local_mode: DetectLocalMode
    cluster_cidrs: tuple[Cidr, ...]
    bridge_interface: str
    interface_name_prefix: str
    node_port_addresses: NodePortAddresses
    """(): the mode decides."""
    masquerade_all: bool
    masquerade_bit: int
    sync_period: float
    min_sync_period: float
    """0: syncs are paced by their cost, as where neither file nor flag gives a period."""
    client: ClientConnection
    """`client.kubeconfig` is the one to use, from the flag or the file."""
    conntrack: Conntrack
    oom_score_adj: int
    feature_gates: Mapping[str, bool]
    """The effective value of every known gate (e.g. ``AllowServiceExternalIPs``)."""
    verbosity: int
    logging_format: Literal["text", "json"]
    kproxy: Kproxy
    backend_options: Mapping[str, object]
    """The file's options of this mode, named as in the file; durations are floats in seconds."""
    option_sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The flag or the path in the file that set each of `backend_options`."""
    reported_version: str = ""
    """The version to report; "": our own."""
    document: KubeProxyConfiguration = KubeProxyConfiguration()
    """Flags and file together, in the form of a file."""
    notices: tuple[str, ...] = ()
    """Notices for the operator that do not prevent a start."""

    @property
    def effect(self) -> "Config":
        """The same settings, wherever they come from."""
        return msgspec.structs.replace(self, option_sources={}, document=KubeProxyConfiguration())

    def is_like(self, other: "Config") -> bool:
        """Compare, except whether a changed mode is followed, and the options of other modes."""
        section = msgspec.structs.replace(other.kproxy, live_mode_switch=self.kproxy.live_mode_switch,
                                          backend_options=self.kproxy.backend_options)  # fmt: skip
        return self.effect == msgspec.structs.replace(other.effect, kproxy=section)


def resolve(flags: Flags, file: FileConfig | None) -> Config:
    """Return the effective configuration.

    As in kube-proxy, a file replaces all flags except those that apply beside it (see
    `kproxy_core.config.flags`); other given flags get a notice. Unlike there, ``--mode`` wins.
    Without a mode in either, the settings belong to no mode in particular: resolve again with
    ``--mode`` once a mode is chosen.

    Raises ConfigError with every problem found.
    """
    merged = merge(flags, file)
    document = merged.document
    parse = _Parser(document)
    _, section = document.section_of(document.mode)
    options = _options(document)
    local_mode = parse.detect_local_mode()
    bind_address = parse.bind_address()
    anywhere, loopback = ("0.0.0.0", "127.0.0.1") if len(bind_address) == 4 else ("::", "::1")
    config = Config(
        mode=document.mode,
        hostname_override=parse.hostname(),
        master=flags.get("master", ""),
        bind_address=bind_address,
        healthz_bind_address=None if merged.no_health_server else parse.server(
            "healthzBindAddress", document.healthz_bind_address, anywhere, merged.healthz_port),
        metrics_bind_address=parse.server(
            "metricsBindAddress", document.metrics_bind_address, loopback, merged.metrics_port),
        bind_address_hard_fail=document.bind_address_hard_fail,
        enable_profiling=document.enable_profiling,
        detect_local_mode=local_mode,
        cluster_cidrs=parse.cluster_cidrs() if local_mode is DetectLocalMode.CLUSTER_CIDR else (),
        bridge_interface=document.detect_local.bridge_interface,
        interface_name_prefix=document.detect_local.interface_name_prefix,
        node_port_addresses=parse.node_port_addresses(),
        masquerade_all=getattr(section, "masquerade_all", document.iptables.masquerade_all),
        masquerade_bit=getattr(section, "masquerade_bit", document.iptables.masquerade_bit),
        sync_period=section.sync_period,
        min_sync_period=0.0 if isinstance(pause := section.min_sync_period, DefaultDuration) else pause,
        client=document.client_connection,
        conntrack=document.conntrack,
        oom_score_adj=document.oom_score_adj,
        feature_gates=gates_in_effect(document.feature_gates),
        verbosity=document.logging.verbosity,
        logging_format="json" if document.logging.format == "json" else "text",
        kproxy=document.kproxy,
        backend_options={option: value for option, (_, value) in options.items()},
        option_sources={option: merged.option(path) for option, (path, _) in options.items()},
        document=document,
        reported_version=given if (given := flags.get("version", "")).startswith("v") else "",
        notices=(*merged.notices, *(
            f"{merged.option(path)} has no effect: {reason}" for path, reason in notices_about(document))),
    )
    problems = [*problems_of(document), *parse.problems]
    if merged.problems or problems:
        raise ConfigError((*merged.problems, *(merged.as_given(problem) for problem in problems)))
    return config


def parse_node_port_addresses(words: Sequence[str]) -> NodePortAddresses:
    """Parse CIDRs, or the single word ``primary``. Raises ConfigError that names each wrong word."""
    if list(words) == ["primary"]:
        return "primary"
    cidrs, problems = [], []
    for index, word in enumerate(words):
        try:
            cidrs.append(parse_cidr(word.strip()))
        except ValueError:
            problems.append(Problem(f"nodePortAddresses[{index}]", word, "must be a CIDR, or only 'primary'"))
    if problems:
        raise ConfigError(tuple(problems))
    return tuple(cidrs)


class _Parser:
    """Parses the text fields of one document, and collects the problems."""

    def __init__(self, document: KubeProxyConfiguration) -> None:
        self._document = document
        self.problems: list[Problem] = []

    def hostname(self) -> str:
        text = self._document.hostname_override
        if text and not text.strip():
            self._bad("hostnameOverride", text, "must not be blank")
        return text.strip().lower()

    def bind_address(self) -> Address:
        text = self._document.bind_address
        try:
            return parse_address(text)
        except ValueError:
            self._bad("bindAddress", text, "must be an IP address")
            return Address(bytes(4))

    def server(self, path: str, text: str, default_address: str, default_port: int) -> BindAddress:
        """Parse ``IP:port``; either part may be missing."""
        try:
            return BindAddress(parse_address(text or default_address), default_port)
        except ValueError:
            host, _, port = text.rpartition(":")
        try:
            bracketed = host.startswith("[") and host.endswith("]")
            address = parse_address(host[1:-1] if bracketed else host)
            number = int(port) if port.isascii() and port.isdigit() else 0
            if bracketed != (":" in host) or not 0 < number < 65536:
                raise ValueError(text)
            return BindAddress(address, number)
        except ValueError:
            self._bad(path, text, "must be IP:port, with a port of 1 to 65535")
            return BindAddress(parse_address(default_address), default_port)

    def detect_local_mode(self) -> DetectLocalMode:
        text = self._document.detect_local_mode
        try:
            mode = DetectLocalMode(text or "ClusterCIDR")
        except ValueError:
            modes = ", ".join(mode.value for mode in DetectLocalMode)
            self._bad("detectLocalMode", text, f"must be one of {modes}")
            return DetectLocalMode.CLUSTER_CIDR
        detail = self._document.detect_local
        if mode is DetectLocalMode.BRIDGE_INTERFACE:
            self._interface("detectLocal.bridgeInterface", detail.bridge_interface, LONGEST_INTERFACE, text)
        if mode is DetectLocalMode.INTERFACE_NAME_PREFIX:
            self._interface("detectLocal.interfaceNamePrefix", detail.interface_name_prefix,
                            LONGEST_INTERFACE - 1, text)
        return mode

    def _interface(self, path: str, name: str, longest: int, mode: str) -> None:
        if not name:
            self._bad(path, name, f"must not be empty with detectLocalMode {mode}")
        elif not is_interface_name(name, longest):
            self._bad(path, name, f"must be at most {longest} letters, digits and signs but / : * \" and \\")

    def cluster_cidrs(self) -> tuple[Cidr, ...]:
        text = self._document.cluster_cidr
        cidrs = []
        for word in text.split(",") if text else ():
            try:
                cidrs.append(parse_cidr(word.strip()))
            except ValueError:
                self._bad("clusterCIDR", word, "must be a CIDR")
        if len({cidr.family for cidr in cidrs}) < len(cidrs):
            self._bad("clusterCIDR", text, "must be one CIDR, or one of each IP family")
        return tuple(cidrs)

    def node_port_addresses(self) -> NodePortAddresses:
        try:
            return parse_node_port_addresses(self._document.node_port_addresses)
        except ConfigError as error:
            self.problems += error.problems
            return ()

    def _bad(self, path: str, value: object, problem: str) -> None:
        self.problems.append(Problem(path, value, problem))


def _options(document: KubeProxyConfiguration) -> dict[str, tuple[str, object]]:
    """Return the path and value of each option of the mode.

    These are its section or fields in kube-proxy's format, and our additions.
    """
    mode = document.mode
    name, section = document.section_of(mode)
    if name == mode:
        own = {f.encode_name: (f"{name}.{f.encode_name}", getattr(section, f.name))
               for f in msgspec.structs.fields(section)}  # fmt: skip
    else:
        own = {path: (path, field_at(document, path)) for path in OUTSIDE_SECTIONS.get(mode, ())}
    added = document.kproxy.backend_options.get(mode, {})
    return own | {option: (f"kproxy.backendOptions.{mode}.{option}", added[option]) for option in added}
