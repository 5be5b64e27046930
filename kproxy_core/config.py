"""Flags and configuration file -> one frozen Config; an error names the option."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeVar

import msgspec

from kproxy_core.configcheck import FEATURE_GATES, problems_of
from kproxy_core.configfile import (
    ClientConnection,
    ConfigError,
    Conntrack,
    FileConfig,
    KubeProxyConfiguration,
    ModeSection,
    Problem,
    load,
    unknown_field,
)
from kproxy_core.model.address import (
    Address,
    Cidr,
    format_socket,
    parse_address,
    parse_cidr,
)

__all__ = [
    "BindAddress", "Config", "ConfigError", "DetectLocalMode", "FileConfig", "Flags",
    "NodePortAddresses", "Problem", "load", "parse_node_port_addresses", "resolve",
]


class DetectLocalMode(enum.Enum):
    """How traffic of this node's pods is recognised."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


NodePortAddresses = tuple[Cidr, ...] | Literal["primary"]
"""Networks whose addresses serve node ports; (): not said, the mode decides; primary: the node's own."""


class BindAddress(NamedTuple):
    """An address and TCP port that a server of this process listens on."""

    address: Address
    port: int

    def __str__(self) -> str:
        return format_socket(self.address, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything an operator decided, checked. Periods in seconds."""

    mode: str
    """"": not said; the preferred usable backend."""
    hostname_override: str
    """Trimmed and in lower case; "": the machine's name."""
    manifests: str
    """Directory to read objects from; "": an API server."""
    master: str
    bind_address: Address
    """Overrides the detected node address unless unspecified; nothing listens on it."""
    healthz_bind_address: BindAddress
    metrics_bind_address: BindAddress
    bind_address_hard_fail: bool
    enable_profiling: bool
    detect_local_mode: DetectLocalMode
    cluster_cidrs: tuple[Cidr, ...]
    bridge_interface: str
    interface_name_prefix: str
    node_port_addresses: NodePortAddresses
    masquerade_all: bool
    masquerade_bit: int
    sync_period: float
    min_sync_period: float
    config_sync_period: float
    client: ClientConnection
    """`client.kubeconfig` is the one to use, from the flag or the file."""
    conntrack: Conntrack
    oom_score_adj: int
    feature_gates: Mapping[str, bool]
    """Every gate this proxy knows, as it is in effect (e.g. ``AllowServiceExternalIPs``)."""
    verbosity: int
    logging_format: Literal["text", "json"]
    backend_options: Mapping[str, object]
    """The mode's own section of the file, names as in the file; durations are floats in seconds."""
    notices: tuple[str, ...] = ()
    """What an operator should be told although nothing is wrong enough to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The command line, each flag under its own name; None: not given."""

    mode: str | None = None
    manifests: str | None = None
    master: str | None = None
    kubeconfig: str | None = None
    hostname_override: str | None = None
    v: int | None = None
    logging_format: str | None = None
    bind_address: str | None = None
    healthz_bind_address: str | None = None
    metrics_bind_address: str | None = None
    detect_local_mode: str | None = None
    cluster_cidr: str | None = None
    pod_bridge_interface: str | None = None
    pod_interface_name_prefix: str | None = None
    nodeport_addresses: str | None = None
    """Separated by commas."""
    masquerade_all: bool | None = None


_FIELDS: dict[str, tuple[str, ...]] = {
    "mode": ("mode",),
    "kubeconfig": ("clientConnection.kubeconfig",),
    "hostname_override": ("hostnameOverride",),
    "v": ("logging.verbosity",),
    "logging_format": ("logging.format",),
    "bind_address": ("bindAddress",),
    "healthz_bind_address": ("healthzBindAddress",),
    "metrics_bind_address": ("metricsBindAddress",),
    "detect_local_mode": ("detectLocalMode",),
    "cluster_cidr": ("clusterCIDR",),
    "pod_bridge_interface": ("detectLocal.bridgeInterface",),
    "pod_interface_name_prefix": ("detectLocal.interfaceNamePrefix",),
    "nodeport_addresses": ("nodePortAddresses",),
    "masquerade_all": ("iptables.masqueradeAll", "nftables.masqueradeAll"),
}
"""The fields of the file that each flag stands for."""

_BESIDE_A_FILE = ("mode", "manifests", "master", "hostname_override", "v", "logging_format")

def resolve(flags: Flags, file: FileConfig | None) -> Config:
    """The configuration in effect.

    A file replaces the flags, as in kube-proxy, except ``--mode``, ``--manifests``, ``--master``,
    ``--hostname-override``, ``--v`` and ``--logging-format``; others that were given get a notice.
    Without a mode in either, the settings are those for no mode in particular: once one is
    chosen, resolve again with `Flags.mode` set to it.

    Raises ConfigError with every problem found.
    """
    document, origins, notices = _merged(flags, file)
    parse = _Parser(document)
    section_name, section = document.section_of(document.mode)
    unknown = file.unknown if file else {}
    options = _options(section) if section_name == document.mode else unknown.get(document.mode)
    backend_options = options if isinstance(options, Mapping) else {}
    for name in unknown:
        if not backend_options or name != document.mode:
            notices.append(unknown_field("", name))
    gates = document.feature_gates
    for gate in sorted(gates.keys() - FEATURE_GATES.keys()):
        notices.append(f"featureGates.{gate}: there is no such gate here, it has no effect")
    local_mode = parse.detect_local_mode()
    bind_address = parse.bind_address()
    anywhere, loopback = ("0.0.0.0", "127.0.0.1") if len(bind_address) == 4 else ("::", "::1")
    config = Config(
        mode=document.mode,
        hostname_override=parse.hostname(),
        manifests=flags.manifests or "",
        master=flags.master or "",
        bind_address=bind_address,
        healthz_bind_address=parse.server(
            "healthzBindAddress", document.healthz_bind_address, anywhere, 10256),
        metrics_bind_address=parse.server(
            "metricsBindAddress", document.metrics_bind_address, loopback, 10249),
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
        min_sync_period=section.min_sync_period,
        config_sync_period=document.config_sync_period,
        client=document.client_connection,
        conntrack=document.conntrack,
        oom_score_adj=document.oom_score_adj,
        feature_gates={gate: gates.get(gate, default) for gate, default in FEATURE_GATES.items()},
        verbosity=document.logging.verbosity,
        logging_format="json" if document.logging.format == "json" else "text",
        backend_options=backend_options,
        notices=tuple(notices),
    )
    problems = [*problems_of(document), *parse.problems]
    if problems:
        raise ConfigError(tuple(_as_given(problem, origins) for problem in problems))
    return config


def parse_node_port_addresses(words: Sequence[str]) -> NodePortAddresses:
    """CIDRs, or the single word ``primary``. Raises ConfigError naming each wrong one."""
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
    """Turns the text of one document into values, collecting what can't be."""

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
        """``IP:port``; either may be missing."""
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
        if mode is DetectLocalMode.BRIDGE_INTERFACE and not detail.bridge_interface:
            self._bad("detectLocal.bridgeInterface", "", f"must not be empty with detectLocalMode {text}")
        if mode is DetectLocalMode.INTERFACE_NAME_PREFIX and not detail.interface_name_prefix:
            self._bad("detectLocal.interfaceNamePrefix", "", f"must not be empty with detectLocalMode {text}")
        return mode

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


def _merged(
    flags: Flags, file: FileConfig | None
) -> tuple[KubeProxyConfiguration, dict[str, str], list[str]]:
    """The document in effect, the flag behind each field that one stands for, and notices."""
    document = file.document if file else KubeProxyConfiguration()
    notices = list(file.notices) if file else []
    origins: dict[str, str] = {}
    for flag in fields(Flags):
        value = getattr(flags, flag.name)
        given = value is not None and value != ""
        option = "--" + flag.name.replace("_", "-")
        if given and file and flag.name not in _BESIDE_A_FILE:
            notices.append(f"{option} has no effect beside --config")
        elif given or not file:
            for path in _FIELDS.get(flag.name, ()):
                origins[path] = option
                if given:
                    document = _with(document, path, value)
    return document, origins, notices


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _with(section: _Struct, path: str, value: object) -> _Struct:
    """*section* with the field at *path*, as the file spells it, set to *value*."""
    head, _, rest = path.partition(".")
    name = next(f.name for f in msgspec.structs.fields(section) if f.encode_name == head)
    if rest:
        value = _with(getattr(section, name), rest, value)
    elif name == "node_port_addresses":
        value = tuple(str(value).split(","))
    return msgspec.structs.replace(section, **{name: value})


def _options(section: ModeSection) -> dict[str, object]:
    return {field.encode_name: getattr(section, field.name) for field in msgspec.structs.fields(section)}


def _as_given(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """*problem* under the name of the flag that set the field, if one did."""
    path, bracket, index = problem.option.partition("[")
    return problem._replace(option=origins.get(path, path) + bracket + index)
