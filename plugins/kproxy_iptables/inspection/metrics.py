"""Metrics of the mode, under kube-proxy's names (kube-proxy 1.36, pkg/proxy/metrics/metrics.go)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kproxy_core.backend.api import Measurement
from kproxy_core.model.address import Family
from kproxy_iptables import names
from kproxy_iptables.kernel.accounting import read_packets
from kproxy_iptables.names import FILTER, NAT

_SYNC = "kubeproxy_sync_proxy_rules_iptables"
_PACKETS = {
    names.INVALID_COUNTER: (
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Packets dropped because conntrack could not place them",
    ),
    names.LOCALHOST_COUNTER: (
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Packets to node ports on loopback addresses",
    ),
}


@dataclass(slots=True)
class Counts:
    """Rules and failures of one family. Written by one thread, read by any."""

    family: Family
    rules: Mapping[str, int] = field(default_factory=lambda: {FILTER: 0, NAT: 0})
    """Rules in the kernel by table."""
    last: Mapping[str, int] = field(default_factory=lambda: {FILTER: 0, NAT: 0})
    """Rules that kube-proxy would have written in the last sync, by table."""
    failures: int = 0
    """Failed calls of iptables-restore."""
    partial_failures: int = 0
    """Failed syncs of changed Services only."""
    busy: int = 0
    """Timeouts while waiting for the xtables lock."""


def measurements(counts: Iterable[Counts]) -> Iterator[Measurement]:
    """Yield all metrics, with the kernel's packet counters. May be called from any thread."""
    for of in counts:
        family = {"ip_family": of.family.label}
        for table in (FILTER, NAT):
            labels = {"table": table, **family}
            yield Measurement(f"{_SYNC}_total", "Rules in place", "gauge", of.rules[table], labels)
            yield Measurement(
                f"{_SYNC}_last", "Rules of the last sync, as kube-proxy counts them", "gauge",
                of.last[table], labels,
            )  # fmt: skip
        for metric, about, count in (
            (f"{_SYNC}_restore_failures_total", "Failures of iptables-restore", of.failures),
            (f"{_SYNC}_partial_restore_failures_total", "Failures of syncs of changed Services only",
             of.partial_failures),
            ("kproxy_iptables_lock_timeouts_total", "Timeouts while waiting for the xtables lock", of.busy),
        ):  # fmt: skip
            yield Measurement(metric, about, "counter", count, family)
    for name, (metric, about) in _PACKETS.items():
        if (packets := read_packets(name)) is not None:
            yield Measurement(metric, about, "counter", packets)
