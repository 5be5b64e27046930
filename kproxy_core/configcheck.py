"""What must hold for a configuration beside the types of its fields.

The rules are kube-proxy 1.36's, pkg/proxy/apis/config/validation; fields that hold addresses are
judged where they are parsed, in `kproxy_core.config`.
"""

import re
from collections.abc import Iterator

import msgspec

from kproxy_core.configfile import Duration, KubeProxyConfiguration, Logging, Problem
from kproxy_core.model.address import parse_cidr

FEATURE_GATES = {
    "AllowServiceExternalIPs": True,
    "ComponentFlagz": True,
    "ComponentStatusz": True,
    "ContextualLogging": True,
    "LoggingAlphaOptions": False,
    "LoggingBetaOptions": True,
    "MultiCIDRServiceAllocator": True,
    "NativeHistograms": False,
    "PreferSameTrafficDistribution": True,
}
"""The gates that mean something to a service proxy, with their defaults. Others are no mistake:
a cluster gives the same gates to all its components."""

_LOCKED_GATES = ("MultiCIDRServiceAllocator", "PreferSameTrafficDistribution")
_PREVIOUS_MINOR = "1.35"


def problems_of(document: KubeProxyConfiguration) -> Iterator[Problem]:
    """Everything that is wrong with *document*."""
    if not re.fullmatch(r"[a-z0-9-]*", document.mode, re.ASCII):
        yield Problem("mode", document.mode, "must be lower case letters, digits and dashes")
    for gate in _LOCKED_GATES:
        if not document.feature_gates.get(gate, True):
            yield Problem(f"featureGates.{gate}", False, "is locked to true")
    yield from _periods(document)
    yield from _masquerade_bits(document)
    yield from _ipvs(document)
    yield from _negative("conntrack", document.conntrack)
    yield from _logging(document.logging, document.feature_gates.get("LoggingAlphaOptions", False))
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


def _negative(path: str, section: msgspec.Struct, *only: str) -> Iterator[Problem]:
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if (not only or field.name in only) and isinstance(value, int | Duration) and value < 0:
            yield Problem(f"{path}.{field.encode_name}", value, _NOT_NEGATIVE)
