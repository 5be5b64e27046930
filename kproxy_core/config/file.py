"""The configuration file: KubeProxyConfiguration ``kubeproxy.config.k8s.io/v1alpha1``, decoded.

Field names, types and defaults are those of kube-proxy 1.36. Decoding checks only the types of values; their
rules are in `kproxy_core.config.check` and `kproxy_core.config.settings`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec

from kproxy_core.model.duration import DefaultDuration, Duration, NumberOrDuration, duration_from
from kproxy_core.model.near_names import did_you_mean
from kproxy_core.model.service import parse_last_resort

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"


class Problem(NamedTuple):
    option: str
    """The flag (``--mode``) or the path of the field (``conntrack.min``)."""
    value: object
    problem: str

    def __str__(self) -> str:
        value = str(self.value) if isinstance(self.value, Duration) else repr(self.value)
        return f"{self.option}: {value}: {self.problem}"


class ConfigError(Exception):
    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    ZERO_IS_DEFAULT: ClassVar[frozenset[str]] = frozenset()
    """Fields in which 0 or "" means the default."""


class ClientConnection(_Section, frozen=True, kw_only=True, rename="camel"):
    """The connection to the API server; qps in requests per second."""

    ZERO_IS_DEFAULT = frozenset({"content_type", "qps", "burst"})
    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: Int32 = 10


class LoggingStream(_Section, frozen=True, kw_only=True, rename="camel"):
    split_stream: bool = False
    info_buffer_size: str | int = "0"


class LoggingOptions(_Section, frozen=True, kw_only=True, rename="camel"):
    text: LoggingStream = LoggingStream()
    json: LoggingStream = LoggingStream()


class VModule(_Section, frozen=True, kw_only=True, rename="camel"):
    file_pattern: str = ""
    verbosity: int = 0


class Logging(_Section, frozen=True, kw_only=True, rename="camel"):
    ZERO_IS_DEFAULT = frozenset({"format", "flush_frequency"})
    format: str = "text"
    flush_frequency: NumberOrDuration = NumberOrDuration(5)
    verbosity: Int32 = 0
    vmodule: tuple[VModule, ...] = ()
    options: LoggingOptions = LoggingOptions()


class Conntrack(_Section, frozen=True, kw_only=True, rename="camel"):
    """Limits and timeouts of connection tracking. 0 in a timeout or ``max_per_core`` keeps the kernel's."""

    max_per_core: Int32 = 32768
    min: Int32 = 131072
    tcp_established_timeout: Duration = Duration(86400)
    tcp_close_wait_timeout: Duration = Duration(3600)
    tcp_be_liberal: bool = False
    udp_timeout: Duration = Duration(0)
    udp_stream_timeout: Duration = Duration(0)


class DetectLocal(_Section, frozen=True, kw_only=True, rename="camel"):
    """The interface names that some values of detectLocalMode need."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class ModeSection(_Section, frozen=True, kw_only=True, rename="camel"):
    ZERO_IS_DEFAULT = frozenset({"sync_period", "min_sync_period"})
    sync_period: Duration = Duration(30)
    min_sync_period: Duration = DefaultDuration(1)


class Iptables(ModeSection, frozen=True, kw_only=True, rename="camel"):
    """Also used by modes without a section of their own."""

    masquerade_bit: Int32 = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True


class Ipvs(ModeSection, frozen=True, kw_only=True, rename="camel"):
    min_sync_period: Duration = DefaultDuration(0)
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] | None = msgspec.field(default=None, name="excludeCIDRs")
    strict_arp: bool = msgspec.field(default=False, name="strictARP")
    tcp_timeout: Duration = Duration(0)
    tcp_fin_timeout: Duration = Duration(0)
    udp_timeout: Duration = Duration(0)


class Nftables(ModeSection, frozen=True, kw_only=True, rename="camel"):
    masquerade_bit: Int32 = 14
    masquerade_all: bool = False


class Winkernel(_Section, frozen=True, kw_only=True, rename="camel"):
    """kube-proxy's section for Windows."""

    enable_dsr: bool = msgspec.field(default=False, name="enableDSR")
    forward_health_check_vip: bool = False
    network_name: str = ""
    root_hns_endpoint_name: str = ""
    source_vip: str = ""


class Kproxy(_Section, frozen=True, kw_only=True, rename="camel"):
    """The section that kube-proxy does not have."""

    manifests: str = ""
    """Directory to read objects from; "": an API server."""
    state_directory: str = "/run/kproxy"
    """Directory of state that must outlive the process, but not a reboot."""
    mode_fallback: str = "auto"
    """``auto``: another mode may serve if this machine lacks what the mode needs; ``never``: none may."""
    own_tables: str = "auto"
    """``auto``: only kproxy can change its tables, where the kernel supports it; ``never``: others can."""
    exclusive: bool = False
    """Exit instead of standing by while another kproxy serves this network namespace."""
    live_mode_switch: bool = False
    """Follow a changed `mode` in this file without a restart."""
    switch_modes: tuple[str, ...] = ()
    """Modes besides `mode` for which ``--init-only`` sets sysctls and loads modules."""
    mode_from_node_label: str = ""
    """Key of the label with which this Node names the mode to serve in; "": none."""
    plugins: tuple[str, ...] = ()
    """Plugins to load, by name or module, and ``no:NAME`` for those to block. The last entry for a plugin
    counts."""
    traffic_metrics: str | bool = "off"
    """``off``, ``service`` or ``endpoint``: the detail with which connections are counted. YAML reads a plain
    ``off`` as false, which means the same."""
    max_series: Int32 = 10_000
    """Maximum number of series of traffic metrics; all others are added up in one."""
    removed_endpoints: str = "keep"
    """``keep`` or ``reset``: what happens to connections to endpoints that were removed."""
    endpoint_health: str | bool = "off"
    """``off`` (false, as above) or ``passive``: whether silent endpoints are avoided."""
    count_refusals: bool = False
    """With `endpoint_health`: an endpoint that refuses connections is avoided like a silent one."""
    last_resort: str | bool = "off"
    """``off`` (false, as above), or the duration for which the endpoints that were ready last are used while
    none is ready."""
    backend_options: dict[str, dict[str, Any]] = {}
    """Options of backends without a section in kube-proxy's format, by mode."""

    @property
    def count_traffic(self) -> bool:
        return self.traffic_metrics in ("service", "endpoint")

    @property
    def last_resort_seconds(self) -> float:
        """0: off. Raises ValueError if `last_resort` is wrong."""
        return parse_last_resort("off" if self.last_resort is False else str(self.last_resort))


_SECTIONS = {"ebpf": "nftables"}
"""Modes without a section of their own, with the mode whose section they use."""


class KubeProxyConfiguration(_Section, frozen=True, kw_only=True, rename="camel"):
    """The whole file. An address or mode of "" is not set."""

    ZERO_IS_DEFAULT = frozenset({"bind_address", "config_sync_period", "udp_idle_timeout"})
    feature_gates: dict[str, bool] = {}
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = "0.0.0.0"
    healthz_bind_address: str = ""
    metrics_bind_address: str = ""
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: Iptables = Iptables()
    ipvs: Ipvs = Ipvs()
    nftables: Nftables = Nftables()
    detect_local_mode: str = ""
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: str = msgspec.field(default="", name="clusterCIDR")
    node_port_addresses: tuple[str, ...] | None = None
    oom_score_adj: Int32 = -999
    conntrack: Conntrack = Conntrack()
    config_sync_period: Duration = Duration(900)
    port_range: str = ""
    udp_idle_timeout: Duration | None = None
    """None: the default of the mode."""
    winkernel: Winkernel = Winkernel()
    windows_run_as_service: bool = False
    kproxy: Kproxy = Kproxy()

    def section_of(self, mode: str) -> tuple[str, ModeSection]:
        """Return name and content of the section of *mode*: its own, its base's, or else iptables."""
        name = _SECTIONS.get(mode, mode)
        section = getattr(self, name, None) if name.isidentifier() else None
        return (name, section) if isinstance(section, ModeSection) else ("iptables", self.iptables)


class FileConfig(msgspec.Struct, frozen=True):
    document: KubeProxyConfiguration
    notices: tuple[str, ...] = ()
    """Warnings for its author: unknown and duplicate fields."""
    path: str = ""
    content: bytes = b""
    """The bytes of the file."""


def load(path: str) -> FileConfig:
    """Read and decode the file *path*, YAML or JSON. Raises ConfigError naming every wrong field."""
    try:
        with open(path, "rb") as file:
            content = file.read()
        return msgspec.structs.replace(decode(content.decode()), path=path, content=content)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError((Problem("--config", path, f"can't be read: {reason}"),)) from error


def decode(text: str) -> FileConfig:
    """Decode the *text* of a file. As kube-proxy does, unknown and duplicate fields are only noted.

    Raises ConfigError naming every field of a wrong type.
    """
    found = _Found()
    raw = found.parse(text)
    if not isinstance(raw, dict):
        raise ConfigError((Problem("--config", raw, f"is not a {KIND}"),))
    rest = {name: value for name, value in raw.items() if name not in ("apiVersion", "kind")}
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if raw.get(name) != wanted:
            found.problems.append(Problem(name, raw.get(name, ""), f"must be {wanted}"))
    document = found.section(KubeProxyConfiguration, rest, "")
    if found.problems:
        raise ConfigError(tuple(found.problems))
    return FileConfig(document, tuple(found.notices))


def _hint_at(name: str, kind: type[_Section], path: str) -> str:
    """Return a hint at the field that *name* means in the section *kind* at *path*; "" if none is near."""
    elsewhere = [found for found in _PATHS if found.rpartition(".")[2] == name]
    if elsewhere and name not in kind.__struct_encode_fields__:
        return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
    return did_you_mean(name, kind.__struct_encode_fields__)


def _paths(section: _Section, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields of *section* that are no sections."""
    for each in msgspec.structs.fields(section):
        if isinstance(each.default, _Section):
            yield from _paths(each.default, f"{path}{each.encode_name}.")
        else:
            yield f"{path}{each.encode_name}"


_PATHS = tuple(_paths(KubeProxyConfiguration()))


_S = TypeVar("_S", bound=_Section)


class _Found:
    """Decodes one file, and collects notices and problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notices: list[str] = []

    def section(self, kind: type[_S], raw: Mapping[object, object], path: str) -> _S:
        """Decode the section *raw*. *path* leads to it, and ends in a dot unless it is empty."""
        fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
        values: dict[str, object] = {}
        for name, value in raw.items():
            known = fields.get(name) if isinstance(name, str) else None
            if known is None:
                hint = _hint_at(str(name), kind, path)
                self.notices.append(f"{path}{name}: unknown field, ignored{hint}")
            elif value is None:
                continue
            elif isinstance(value, dict) and isinstance(known.default, _Section):
                values[known.name] = self.section(type(known.default), value, f"{path}{name}.")
            else:
                try:
                    converted = msgspec.convert(value, known.type, dec_hook=duration_from)
                    if converted or known.name not in kind.ZERO_IS_DEFAULT:
                        values[known.name] = converted
                except msgspec.ValidationError as error:
                    self.problems.append(_mismatch(f"{path}{name}", value, error))
        return kind(**values)

    def parse(self, text: str) -> object:
        """Parse *text* into plain values. Duplicate keys are noted, and the last one counts."""
        if text.lstrip().startswith("{"):
            import json

            try:
                return json.loads(text, object_pairs_hook=self._pairs)
            except ValueError:
                self.notices.clear()  # not JSON, but YAML in braces
        import yaml

        found = self

        class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
            def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
                found._pairs([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
                mapping: dict[object, object] = super().construct_mapping(node, deep)
                return mapping

        loader = Loader(text)
        try:
            document = loader.get_data() if loader.check_data() else None
        except yaml.YAMLError as error:
            where = " ".join(str(error).split())
            raise ConfigError((Problem("--config", "", f"is neither YAML nor JSON: {where}"),)) from error
        if _has_more(loader):
            self.notices.append("only the first document counts, as in kube-proxy")
        return document

    def _pairs(self, pairs: list[tuple[object, object]]) -> dict[object, object]:
        names = [name for name, _ in pairs]
        self.notices += [f"{name}: duplicate field, the last one counts"
                         for name in dict.fromkeys(names) if names.count(name) > 1]
        return dict(pairs)


def _has_more(loader: Any) -> bool:
    """Return whether anything but empty documents follows in *loader*."""
    import yaml

    try:
        while loader.check_node():
            if loader.get_node().value:
                return True
    except yaml.YAMLError:
        return True
    return False


def _mismatch(path: str, value: object, error: msgspec.ValidationError) -> Problem:
    text, _, where = str(error).replace("`", "").partition(" - at $")
    index = re.fullmatch(r"\[(\d+)\]", where)
    if index and isinstance(value, list):
        value = value[int(index[1])]
    text = text.replace("Expected object", "Expected a mapping").replace(" | null", "")
    return Problem(path + where, value, text)
