"""What the mode counts, under kube-proxy's names (kube-proxy 1.36, pkg/proxy/metrics/metrics.go)."""

from collections.abc import Iterable, Iterator
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
    """What one family's tables have to tell. Written by one thread, read by any."""

    family: Family
    rules: dict[str, int] = field(default_factory=lambda: {FILTER: 0, NAT: 0})
    """Our rules by table."""
    written: dict[str, int] = field(default_factory=lambda: {FILTER: 0, NAT: 0})
    """Rules that the last successful sync added, by table."""
    failures: int = 0
    """Inputs that iptables-restore did not take."""
    partial_failures: int = 0
    """Those among them that only changed Services were in."""
    busy: int = 0
    """Times that the xtables lock could not be had."""


def measurements(counts: Iterable[Counts]) -> Iterator[Measurement]:
    """All of it, the kernel's packet counts included."""
    for of in counts:
        family = {"ip_family": of.family.label}
        for table in (FILTER, NAT):
            labels = {"table": table, **family}
            yield Measurement(f"{_SYNC}_total", "Rules in place", "gauge", of.rules[table], labels)
            yield Measurement(
                f"{_SYNC}_last", "Rules that the last sync wrote", "gauge", of.written[table], labels
            )
        yield Measurement(
            f"{_SYNC}_restore_failures_total", "Failures of iptables-restore", "counter", of.failures, family
        )
        yield Measurement(
            f"{_SYNC}_partial_restore_failures_total", "Failures of syncs of changed Services only",
            "counter", of.partial_failures, family,
        )  # fmt: skip
        yield Measurement(
            "kproxy_iptables_lock_timeouts_total", "Times that the xtables lock could not be had in time",
            "counter", of.busy, family,
        )  # fmt: skip
    for name, (metric, about) in _PACKETS.items():
        packets = read_packets(name)
        if packets is not None:
            yield Measurement(metric, about, "counter", packets)
