"""The effective configuration: flags and file, merged, checked, and written as kube-proxy writes it.

Errors and notices name the flag or the field that they are about.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from kproxy_core.config.check import (
    OUTSIDE_SECTIONS,
    field_at,
    gates_in_effect,
    may_relay_node_ports,
    missing_gate,
    notices_about,
    problems_of,
)
from kproxy_core.config.file import (
    API_VERSION,
    KIND,
    ClientConnection,
    ConfigError,
    Conntrack,
    FileConfig,
    Ipvs,
    Kproxy,
    KubeProxyConfiguration,
    Problem,
    VModule,
)
from kproxy_core.config.flags import FLAGS, Flag, Flags, truth
from kproxy_core.model.address import Address, Cidr, Family, format_socket, parse_address, parse_cidr
from kproxy_core.model.duration import DefaultDuration, Duration, duration_from
from kproxy_core.model.node import LONGEST_INTERFACE, NodePortAddresses, is_interface_name


class Merged(Struct):
    """The document of flags and file together, not checked yet."""

    document: KubeProxyConfiguration
    notices: list[str]
    problems: list[Problem] = field(default_factory=list)
    """Flags whose values have the wrong type."""
    origins: dict[str, str] = field(default_factory=dict)
    """The flag that set each field, by path."""
    healthz_port: int = 10256
    metrics_port: int = 10249
    no_health_server: bool = False

    def option(self, path: str) -> str:
        """Return the name of the flag that set the field at *path*, else the path."""
        path, bracket, index = path.partition("[")
        return self.origins.get(path, path) + bracket + index

    def as_given(self, problem: Problem) -> Problem:
        """Return *problem* under the name of the flag that set the field, if one did."""
        return problem._replace(option=self.option(problem.option))


def merge(flags: Flags, file: FileConfig | None) -> Merged:
    """Merge *flags* and *file*. As in kube-proxy, an empty text flag counts as not given."""
    if file:
        merged = Merged(file.document, list(file.notices))
    else:
        # The flags have one default for all modes; that of the file differs for this one.
        merged = Merged(KubeProxyConfiguration(ipvs=Ipvs(min_sync_period=DefaultDuration(1))), [])
        merged.origins = {path: f"--{flag.name}" for flag in FLAGS.values() for path in flag.fields}
    for parameter, flag in FLAGS.items():
        if flags.get(parameter):
            _take(merged, flag, flags[parameter], file is not None)
    if name := flags.get("hostname_override", "").strip().lower():  # as in kube-proxy, not that of a file
        merged.document = msgspec.structs.replace(merged.document, hostname_override=name)
    if not file and not flags.get("write_config_to"):
        _take_ports(merged, flags)
    return merged


def _take(merged: Merged, flag: Flag, text: str, has_file: bool) -> None:
    option = f"--{flag.name}"
    if has_file and not flag.beside_a_file:
        merged.notices.append(f"{option} has no effect beside --config")
        return
    if flag.no_effect:
        merged.notices.append(f"{option} has no effect: {flag.no_effect}")
    for path in flag.fields:
        merged.origins[path] = option
        try:
            merged.document = _with(merged.document, path.split("."), text)
        except ValueError as error:
            merged.problems.append(Problem(option, text, str(error)))
            return


def _take_ports(merged: Merged, flags: Flags) -> None:
    """Apply the port flags of kube-proxy's first releases, which complete an address without a port."""
    for parameter in ("healthz_port", "metrics_port"):
        text = flags.get(parameter)
        if text is None:
            continue
        option = f"--{FLAGS[parameter].name}"
        if not (text.isascii() and text.isdigit() and int(text) < 65536):
            merged.problems.append(Problem(option, text, "must be a port"))
        elif int(text):
            if flags.get(f"{parameter[:-4]}bind_address"):
                setattr(merged, parameter, int(text))
        elif parameter == "healthz_port":
            merged.no_health_server = True
        else:
            merged.problems.append(Problem(option, text, "the metrics server cannot be disabled"))


def _with(section: Any, path: list[str], text: str) -> Any:
    """Return *section* with the field at *path*, in the spelling of the file, parsed from *text*.

    In a mapping, whose values have no types, *text* is the value. Raises ValueError.
    """
    name, *rest = path
    if isinstance(section, dict):
        return section | {name: _with(section.get(name, {}), rest, text) if rest else text}
    found = next(f for f in msgspec.structs.fields(section) if f.encode_name == name)
    before = getattr(section, found.name)
    value = _with(before, rest, text) if rest else _value(found, text, before)
    return msgspec.structs.replace(section, **{found.name: value})


_LISTS = ("exclude_cidrs", "node_port_addresses")
"""Fields with lists that are None unless they are given."""


def _value(found: msgspec.structs.FieldInfo, text: str, before: object) -> object:
    if isinstance(before, bool):
        return truth(text)
    if isinstance(before, str):
        return text
    if isinstance(before, dict):
        return before | dict(_gates(text.split(",")))
    if found.name == "vmodule" and isinstance(before, tuple):
        return (*_vmodule(text.split(",")), *before)
    if found.name == "plugins" and isinstance(before, tuple):
        return (*before, *text.split(","))
    if isinstance(before, tuple) or found.name in _LISTS:
        return tuple(text.split(","))
    try:
        value: object = msgspec.convert(text, found.type, strict=False, dec_hook=duration_from)
    except msgspec.ValidationError as error:
        raise ValueError(_wanted(str(error))) from error
    return value


def _wanted(refusal: str) -> str:
    """Reword msgspec's *refusal*."""
    if refusal.startswith(("Expected `int`", "Expected `float`")):
        return "must be a whole number" if "`int`" in refusal else "must be a number"
    return refusal.replace("`", "")


def _gates(pairs: Iterable[str]) -> Iterable[tuple[str, bool]]:
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError("must be GATE=true or GATE=false, separated by commas")
        yield name.strip(), truth(value.strip())


def _vmodule(pairs: Iterable[str]) -> Iterable[VModule]:
    for pair in pairs:
        pattern, _, level = pair.partition("=")
        if not pattern or not (level.isascii() and level.isdigit()):
            raise ValueError("must be PATTERN=N, separated by commas")
        yield VModule(file_pattern=pattern, verbosity=int(level))


class DetectLocalMode(enum.Enum):
    """How traffic from this node's pods is recognized."""

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
    """0, also if neither file nor flag sets a period: syncs are paced by their cost."""
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
    def missing_gate(self) -> str:
        """The feature gate that the mode needs and that is off; "" if none."""
        return missing_gate(self.mode, self.feature_gates)

    @property
    def may_relay_node_ports(self) -> bool:
        """No feature gate forbids the mode to have node ports relayed on loopback."""
        return may_relay_node_ports(self.mode, self.feature_gates)

    @property
    def effect(self) -> "Config":
        """The same settings without their sources, to compare."""
        return msgspec.structs.replace(self, option_sources={}, document=KubeProxyConfiguration())

    def is_like(self, other: "Config") -> bool:
        """Compare all settings but `live_mode_switch` and the options of other modes."""
        section = msgspec.structs.replace(other.kproxy, live_mode_switch=self.kproxy.live_mode_switch,
                                          backend_options=self.kproxy.backend_options)  # fmt: skip
        return self.effect == msgspec.structs.replace(other.effect, kproxy=section)


def resolve(flags: Flags, file: FileConfig | None, *, serves: bool = True) -> Config:
    """Return the effective configuration. *serves*: a mode whose feature gate is off is a problem.

    As in kube-proxy, a file replaces all flags except those that apply beside it (see
    `kproxy_core.config.flags`); other flags get a notice. Unlike in kube-proxy, ``--mode`` overrides the
    file. If neither names a mode, resolve again with ``--mode`` once it is chosen: settings depend on it.

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
    if serves and config.missing_gate:
        problems.append(Problem("mode", document.mode, f"needs the feature gate {config.missing_gate}"))
    if merged.problems or problems:
        raise ConfigError((*merged.problems, *(merged.as_given(problem) for problem in problems)))
    return config


def parse_node_port_addresses(words: Sequence[str]) -> NodePortAddresses:
    """Parse CIDRs and the keywords of kube-proxy 1.37, which stand for networks, in any combination.

    A keyword may be given once, as there. Raises ConfigError that names each wrong word.
    """
    found: list[Cidr | Literal["primary"]] = []
    problems = []
    texts = [word.strip() for word in words]
    for index, text in enumerate(texts):
        match text:
            case "primary" | "localhost" | "all" if text in texts[:index]:
                problems.append(Problem(f"nodePortAddresses[{index}]", words[index], "is given twice"))
            case "primary":
                found.append(text)
            case "localhost":
                found += [family.loopback_cidr for family in Family]
            case "all":
                found += [Cidr(family.unspecified, 0) for family in Family]
            case _:
                try:
                    found.append(parse_cidr(text))
                except ValueError:
                    problems.append(Problem(
                        f"nodePortAddresses[{index}]", words[index],
                        "must be a CIDR, primary, localhost or all"))
    if problems:
        raise ConfigError(tuple(problems))
    return tuple(found)


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
            return parse_node_port_addresses(self._document.node_port_addresses or ())
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


_LEFT_OUT_IF_EMPTY = frozenset({
    "featureGates", "splitStream", "udpIdleTimeout", "vmodule", "windowsRunAsService"})
_WRITTEN_SECTIONS = ("iptables", "ipvs", "nftables")
_STRING = "tag:yaml.org,2002:str"


def effective(config: Config) -> dict[str, Any]:
    """Return *config* as kube-proxy 1.36 writes it to a file, with our section if it is used.

    A *config* without a mode names kube-proxy's default. As in kube-proxy, only the section of the mode has
    periods; in the others, 0s means the default.
    """
    plain = _plain(config.document)
    mode = config.mode or "iptables"
    active, _ = config.document.section_of(mode)
    for name in _WRITTEN_SECTIONS:
        if name != active:
            plain[name] |= {"syncPeriod": "0s", "minSyncPeriod": "0s"}
    everything = "nftables" if active == "nftables" else "iptables"
    for name in ("iptables", "nftables"):
        plain[name]["masqueradeAll"] = name == everything and config.masquerade_all
    if active == "nftables" and not plain["nodePortAddresses"]:
        plain["nodePortAddresses"] = ["primary"]
    if mode != "userspace":  # kube-proxy 1.36 accepts these fields, and has no use for them
        plain |= {"portRange": ""}
        plain.pop("udpIdleTimeout", None)
    if config.document.kproxy == Kproxy():
        del plain["kproxy"]
    return plain | {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "mode": mode,
        "detectLocalMode": config.detect_local_mode.value,
        "healthzBindAddress": str(config.healthz_bind_address or ""),
        "metricsBindAddress": str(config.metrics_bind_address),
    }


def written(config: Config) -> str:
    import yaml  # expensive, and only needed here

    class Dumper(yaml.SafeDumper):
        """Quotes like Go's encoder: with double quotes if plain text would be parsed as another type."""

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        ambiguous = not text or dumper.resolve(yaml.ScalarNode, text, (True, False)) != _STRING  # type: ignore[no-untyped-call]
        return dumper.represent_scalar(_STRING, text, '"' if ambiguous else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump(effective(config), Dumper=Dumper, allow_unicode=True, width=1 << 16)


def effective_flags(flags: Flags) -> dict[str, str]:
    """Return the value of every flag, given or default, by name without dashes."""
    default = _plain(KubeProxyConfiguration())
    values = {}
    for parameter, flag in FLAGS.items():
        value: Any = default if flag.fields else ""
        for name in flag.fields[0].split(".") if flag.fields else ():
            value = value.get(name) if isinstance(value, dict) else None
        text = flags.get(parameter, "" if value is None or value == [] else value)
        if not flag.metavar and not isinstance(text, str):
            text = "true" if text else "false"
        values[flag.name] = ("" if isinstance(text, dict) else str(text)) or ("" if flag.metavar else "false")
    return dict(sorted(values.items()))


def _plain(section: msgspec.Struct) -> dict[str, Any]:
    values = {f.encode_name: _plain_value(getattr(section, f.name)) for f in msgspec.structs.fields(section)}
    return {name: value for name, value in values.items() if value or name not in _LEFT_OUT_IF_EMPTY}


def _plain_value(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return _plain(value)
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain_value(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # YAML has dates, JSON does not.
    return value if isinstance(value, str | int | float | None) else str(value)
