"""Rules beyond the types of fields, as in kube-proxy 1.36, pkg/proxy/apis/config/validation."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kproxy_core.config.file import Kproxy, KubeProxyConfiguration, Logging, Problem
from kproxy_core.model.address import parse_cidr
from kproxy_core.model.duration import Duration


class Gate(NamedTuple):
    """A feature gate of Kubernetes, as of 1.38.0-alpha.2."""

    default: bool
    stage: str
    """``ALPHA``, ``BETA``, or "" for general availability."""
    locked: bool = False
    no_effect: str = ""
    """The reason why the gate changes nothing; "" if it does."""


FEATURE_GATES = {
    "AllowServiceExternalIPs": Gate(True, ""),
    "ComponentFlagz": Gate(True, "BETA"),
    "ComponentStatusz": Gate(True, "BETA"),
    "ContextualLogging": Gate(True, "BETA", no_effect="log lines always have fields"),
    "KubeProxyIPVS": Gate(True, ""),
    "KubeProxyNFTablesLocalhostNodePorts": Gate(True, "BETA"),
    "LoggingAlphaOptions": Gate(False, "ALPHA"),
    "LoggingBetaOptions": Gate(True, "BETA", no_effect="the log has no beta options"),
    "MultiCIDRServiceAllocator": Gate(True, "", locked=True),
    "NFTablesNetlink": Gate(True, "BETA", no_effect="nftables rules are always written as netlink messages"),
    "NativeHistograms": Gate(False, "BETA", no_effect="histograms have buckets"),
    "PreferSameTrafficDistribution": Gate(True, "", locked=True),
}
"""The gates of a service proxy. Others are no error, because a cluster gives all its components the same
gates."""

_GATES_OF_MODES = {"ipvs": "KubeProxyIPVS"}
"""By mode, the gate that must be on to serve in it."""
_GATES_OF_RELAYS = {"nftables": "KubeProxyNFTablesLocalhostNodePorts"}
"""By mode, the gate that must be on to have node ports relayed on loopback."""

_STAGES = {"AllAlpha": "ALPHA", "AllBeta": "BETA"}
"""Gates that stand for all gates of a stage that are not named themselves."""

NO_EFFECT = {
    "logging.flushFrequency": "each line is written at once",
    "logging.vmodule": "its patterns name kube-proxy's source files",
    "logging.options.text.splitStream": "the log is standard error",
    "logging.options.text.infoBufferSize": "each line is written at once",
    "logging.options.json.splitStream": "the log is standard error",
    "logging.options.json.infoBufferSize": "each line is written at once",
    "showHiddenMetricsForVersion": "no metric is hidden",
    "configSyncPeriod": "watches need no resync",
    "winkernel": "it is for Windows",
    "windowsRunAsService": "it is for Windows",
}
"""Fields that are accepted and checked, but change nothing, with the reason."""

OUTSIDE_SECTIONS = {"userspace": ("bindAddress", "portRange", "udpIdleTimeout")}
"""The fields outside of a mode's section that are its options, as in kube-proxy 1.25, by mode."""

_PREVIOUS_MINORS = ("1.35", "1.36", "1.37")
"""Those of 1.36, 1.37 and 1.38, each of which takes only its own."""


def gates_in_effect(given: Mapping[str, bool]) -> dict[str, bool]:
    """Return the value of every known gate: *given*, else that of its whole stage, else the default."""
    stages = {stage: given[name] for name, stage in _STAGES.items() if name in given}
    return {name: given.get(name, stages.get(gate.stage, gate.default))
            for name, gate in FEATURE_GATES.items()}


def missing_gate(mode: str, gates: Mapping[str, bool]) -> str:
    """Return the gate that *mode* needs and that is off by *gates*, those in effect; "" if none."""
    name = _GATES_OF_MODES.get(mode, "")
    return name if name and not gates[name] else ""


def may_relay_node_ports(mode: str, gates: Mapping[str, bool]) -> bool:
    """Return whether *gates*, those in effect, let *mode* have node ports relayed on loopback."""
    return gates.get(_GATES_OF_RELAYS.get(mode, ""), True)


def notices_about(document: KubeProxyConfiguration) -> Iterator[tuple[str, str]]:
    """Yield the path of every given field that changes nothing, with the reason."""
    for path, reason in NO_EFFECT.items():
        if field_at(document, path) != field_at(_DEFAULT, path):
            yield path, reason
    if document.mode != "userspace":
        for path in ("portRange", "udpIdleTimeout"):
            if field_at(document, path):
                yield path, "it is for mode userspace"
    for name, value in sorted(document.feature_gates.items()):
        gate = FEATURE_GATES.get(name)
        if gate is None and name not in _STAGES:
            yield f"featureGates.{name}", "unknown feature gate"
        elif gate is not None and gate.no_effect and value is not gate.default:
            yield f"featureGates.{name}", gate.no_effect


_DEFAULT = KubeProxyConfiguration()


_LABEL_KEY = re.compile(r"(?:(?=[^/]{1,253}/)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
                        r"(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*/)?"
                        r"(?=.{1,63}\Z)[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
"""A DNS subdomain and a slash, which may be missing, then a name (Kubernetes 1.36,
apimachinery/pkg/api/validate/content/kube.go)."""


_NOT_NEGATIVE = "must not be negative"
_POSITIVE = "must be greater than 0"
_WITHIN_A_MARK = "must be within 0 to 31"

RULES: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("kproxy.modeFallback", ("auto", "never").__contains__, "must be auto or never"),
    ("kproxy.modeFromNodeLabel", lambda key: not key or _LABEL_KEY.fullmatch(key),
     "must be the key of a label, such as kproxy.dev/mode"),
    ("kproxy.ownTables", ("auto", "never").__contains__, "must be auto or never"),
    ("kproxy.trafficMetrics", (False, "off", "service", "endpoint").__contains__,
     "must be off, service or endpoint"),
    ("kproxy.removedEndpoints", ("keep", "reset").__contains__, "must be keep or reset"),
    ("kproxy.endpointHealth", (False, "off", "passive").__contains__, "must be off or passive"),
    ("kproxy.maxSeries", lambda count: count > 0, _POSITIVE),
    ("configSyncPeriod", lambda seconds: seconds > 0, _POSITIVE),
    ("iptables.masqueradeBit", range(32).__contains__, _WITHIN_A_MARK),
    ("logging.flushFrequency", lambda seconds: seconds > 0, _POSITIVE),
    ("logging.verbosity", lambda level: level >= 0, _NOT_NEGATIVE),
    ("logging.format", ("text", "json").__contains__, "must be text or json"),
    ("clientConnection.burst", lambda count: count >= 0, _NOT_NEGATIVE),
    ("oomScoreAdj", range(-1000, 1001).__contains__, "must be within -1000 to 1000"),
    ("showHiddenMetricsForVersion", ("", *_PREVIOUS_MINORS).__contains__,
     f"must be the previous minor version, one of {', '.join(_PREVIOUS_MINORS)}"),
)
"""The path of a field, the condition for its value, and the problem with any other value."""


def problems_of(document: KubeProxyConfiguration) -> Iterator[Problem]:
    for path, is_valid, problem in RULES:
        if not is_valid(value := field_at(document, path)):
            yield Problem(path, value, problem)
    for name, gate in FEATURE_GATES.items():
        if gate.locked and document.feature_gates.get(name, gate.default) is not gate.default:
            locked_to = "true" if gate.default else "false"
            yield Problem(f"featureGates.{name}", not gate.default, f"is locked to {locked_to}")
    yield from _last_resort(document.kproxy)
    yield from _periods(document)
    if document.mode == "nftables" and not 0 <= (bit := document.nftables.masquerade_bit) <= 31:
        yield Problem("nftables.masqueradeBit", bit, _WITHIN_A_MARK)
    if document.udp_idle_timeout is not None and document.udp_idle_timeout <= 0:
        yield Problem("udpIdleTimeout", document.udp_idle_timeout, _POSITIVE)
    yield from _ipvs(document)
    yield from _negative("conntrack", document.conntrack)
    yield from _logging(document.logging, gates_in_effect(document.feature_gates)["LoggingAlphaOptions"])


def _last_resort(section: Kproxy) -> Iterator[Problem]:
    try:
        _ = section.last_resort_seconds
    except ValueError as error:
        yield Problem("kproxy.lastResort", section.last_resort, str(error))


def _periods(document: KubeProxyConfiguration) -> Iterator[Problem]:
    name, section = document.section_of(document.mode)
    if section.sync_period <= 0:
        yield Problem(f"{name}.syncPeriod", section.sync_period, _POSITIVE)
    if section.min_sync_period < 0:
        yield Problem(f"{name}.minSyncPeriod", section.min_sync_period, _NOT_NEGATIVE)
    elif section.min_sync_period > section.sync_period > 0:
        yield Problem(f"{name}.syncPeriod", section.sync_period,
                      f"must not be shorter than minSyncPeriod, {section.min_sync_period}")


def _ipvs(document: KubeProxyConfiguration) -> Iterator[Problem]:
    if document.mode != "ipvs":
        return
    yield from _negative("ipvs", document.ipvs, "tcp_timeout", "tcp_fin_timeout", "udp_timeout")
    for index, text in enumerate(document.ipvs.exclude_cidrs or ()):
        try:
            parse_cidr(text)
        except ValueError:
            yield Problem(f"ipvs.excludeCIDRs[{index}]", text, "must be a CIDR")


def _logging(logging: Logging, alpha: bool) -> Iterator[Problem]:
    if logging.format == "json" and logging.vmodule:
        yield Problem("logging.vmodule", len(logging.vmodule), "is for the text format only")
    for name, stream in (("text", logging.options.text), ("json", logging.options.json)):
        for field in () if alpha else msgspec.structs.fields(stream):
            value = getattr(stream, field.name)
            if value not in (0, "0"):
                yield Problem(f"logging.options.{name}.{field.encode_name}", value,
                              "needs the feature gate LoggingAlphaOptions")


def field_at(document: msgspec.Struct, path: str) -> Any:
    """Return the value at *path*, in the spelling of the file."""
    found: Any = document
    for name in path.split("."):
        found = getattr(found, found.__struct_fields__[found.__struct_encode_fields__.index(name)])
    return found


def _negative(path: str, section: msgspec.Struct, *only: str) -> Iterator[Problem]:
    for name, spelled in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
        value = getattr(section, name)
        if (not only or name in only) and isinstance(value, int | Duration) and value < 0:
            yield Problem(f"{path}.{spelled}", value, _NOT_NEGATIVE)
