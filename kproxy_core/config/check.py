"""Rules beyond the types of fields, as in kube-proxy 1.36, pkg/proxy/apis/config/validation."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kproxy_core.config.file import KubeProxyConfiguration, Logging, Problem
from kproxy_core.model.address import parse_cidr
from kproxy_core.model.duration import Duration


class Gate(NamedTuple):
    """A feature gate of Kubernetes 1.36."""

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
    "LoggingAlphaOptions": Gate(False, "ALPHA"),
    "LoggingBetaOptions": Gate(True, "BETA", no_effect="the log has no beta options"),
    "MultiCIDRServiceAllocator": Gate(True, "", locked=True),
    "NativeHistograms": Gate(False, "ALPHA", no_effect="histograms have buckets"),
    "PreferSameTrafficDistribution": Gate(True, "", locked=True),
}
"""The gates of a service proxy. Others are no error, because a cluster gives all its components the same
gates."""

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

OUTSIDE_SECTIONS = {"userspace": ("bindAddress", "portRange")}
"""By mode, the fields outside of its section that are options of this mode (kube-proxy 1.25)."""

_PREVIOUS_MINOR = "1.35"


def gates_in_effect(given: Mapping[str, bool]) -> dict[str, bool]:
    """Return the value of every known gate: *given*, else that of its whole stage, else the default."""
    stages = {stage: given[name] for name, stage in _STAGES.items() if name in given}
    return {name: given.get(name, stages.get(gate.stage, gate.default))
            for name, gate in FEATURE_GATES.items()}


def notices_about(document: KubeProxyConfiguration) -> Iterator[tuple[str, str]]:
    """Yield the path of every given field that changes nothing, with the reason."""
    for path, reason in NO_EFFECT.items():
        if field_at(document, path) != field_at(_DEFAULT, path):
            yield path, reason
    if document.port_range and document.mode != "userspace":
        yield "portRange", "it is for mode userspace"
    for name, value in sorted(document.feature_gates.items()):
        gate = FEATURE_GATES.get(name)
        if gate is None and name not in _STAGES:
            yield f"featureGates.{name}", "unknown feature gate"
        elif gate is not None and gate.no_effect and value is not gate.default:
            yield f"featureGates.{name}", gate.no_effect


_DEFAULT = KubeProxyConfiguration()


def problems_of(document: KubeProxyConfiguration) -> Iterator[Problem]:
    if not re.fullmatch(r"[a-z0-9-]*", document.mode, re.ASCII):
        yield Problem("mode", document.mode, "must be lower case letters, digits and dashes")
    if document.kproxy.mode_fallback not in ("auto", "never"):
        yield Problem("kproxy.modeFallback", document.kproxy.mode_fallback, "must be auto or never")
    if (traffic := document.kproxy.traffic_metrics) not in (False, "off", "service", "endpoint"):
        yield Problem("kproxy.trafficMetrics", traffic, "must be off, service or endpoint")
    if document.kproxy.max_series < 1:
        yield Problem("kproxy.maxSeries", document.kproxy.max_series, "must be greater than 0")
    for name, gate in FEATURE_GATES.items():
        if gate.locked and document.feature_gates.get(name, gate.default) is not gate.default:
            locked_to = "true" if gate.default else "false"
            yield Problem(f"featureGates.{name}", not gate.default, f"is locked to {locked_to}")
    yield from _periods(document)
    yield from _masquerade_bits(document)
    yield from _ipvs(document)
    yield from _negative("conntrack", document.conntrack)
    yield from _logging(document.logging, gates_in_effect(document.feature_gates)["LoggingAlphaOptions"])
    if document.client_connection.burst < 0:
        yield Problem("clientConnection.burst", document.client_connection.burst, _NOT_NEGATIVE)
    if not -1000 <= document.oom_score_adj <= 1000:
        yield Problem("oomScoreAdj", document.oom_score_adj, "must be within -1000 to 1000")
    if document.show_hidden_metrics_for_version not in ("", _PREVIOUS_MINOR):
        yield Problem("showHiddenMetricsForVersion", document.show_hidden_metrics_for_version,
                      f"must be the previous minor version, {_PREVIOUS_MINOR}")


_NOT_NEGATIVE = "must not be negative"


def _periods(document: KubeProxyConfiguration) -> Iterator[Problem]:
    if document.config_sync_period <= 0:
        yield Problem("configSyncPeriod", document.config_sync_period, "must be greater than 0")
    name, section = document.section_of(document.mode)
    if section.sync_period <= 0:
        yield Problem(f"{name}.syncPeriod", section.sync_period, "must be greater than 0")
    if section.min_sync_period < 0:
        yield Problem(f"{name}.minSyncPeriod", section.min_sync_period, _NOT_NEGATIVE)
    elif section.min_sync_period > section.sync_period > 0:
        yield Problem(f"{name}.syncPeriod", section.sync_period,
                      f"must not be shorter than minSyncPeriod, {section.min_sync_period}")


def _masquerade_bits(document: KubeProxyConfiguration) -> Iterator[Problem]:
    bits = {"iptables": document.iptables.masquerade_bit}
    if document.mode == "nftables":
        bits["nftables"] = document.nftables.masquerade_bit
    for name, bit in bits.items():
        if not 0 <= bit <= 31:
            yield Problem(f"{name}.masqueradeBit", bit, "must be within 0 to 31")


def _ipvs(document: KubeProxyConfiguration) -> Iterator[Problem]:
    if document.mode != "ipvs":
        return
    yield from _negative("ipvs", document.ipvs, "tcp_timeout", "tcp_fin_timeout", "udp_timeout")
    for index, text in enumerate(document.ipvs.exclude_cidrs):
        try:
            parse_cidr(text)
        except ValueError:
            yield Problem(f"ipvs.excludeCIDRs[{index}]", text, "must be a CIDR")


def _logging(logging: Logging, alpha: bool) -> Iterator[Problem]:
    if logging.flush_frequency <= 0:
        yield Problem("logging.flushFrequency", logging.flush_frequency, "must be greater than 0")
    if logging.verbosity < 0:
        yield Problem("logging.verbosity", logging.verbosity, _NOT_NEGATIVE)
    if logging.format not in ("text", "json"):
        yield Problem("logging.format", logging.format, "must be text or json")
    elif logging.format == "json" and logging.vmodule:
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
