"""Metrics of the mode, under kube-proxy's names (kube-proxy 1.36, pkg/proxy/metrics/metrics.go)."""

from collections.abc import Iterable, Iterator

from kproxy_core.contract import Measurement
from kproxy_iptables import names
from kproxy_iptables.family import FamilyState
from kproxy_iptables.kernel import read_packets
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


def measurements(states: Iterable[FamilyState]) -> Iterator[Measurement]:
    """Yield all metrics, with the kernel's packet counters. May be called from any thread."""
    for of in states:
        family = {"ip_family": of.tables.family.label}
        for table in (FILTER, NAT):
            labels = {"table": table, **family}
            yield Measurement(f"{_SYNC}_total", "Rules in place", "gauge", of.rules.get(table, 0), labels)
            yield Measurement(
                f"{_SYNC}_last", "Rules of the last sync, as kube-proxy counts them", "gauge",
                of.last_rules.get(table, 0), labels,
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
