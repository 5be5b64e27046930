"""Deviations of this mode from the Service API and from other modes. Pure."""

from collections.abc import Iterator, Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports, of_unclaimed_ports, sorted_plans
from kproxy_iptables.skeleton import serves_loopback

_REMEMBERED = 100
"""Clients of each endpoint: the default of ip_list_tot (net/netfilter/xt_recent.c)."""


def caveats(update: Update, *, localhost_node_ports: bool) -> Sequence[Caveat]:
    loopback = serves_loopback(update.node, enabled=localhost_node_ports)
    return (
        *of_node_ports(update, loopback=loopback, any_local_address=True),
        *of_unclaimed_ports(update),
        *_affinity(update),
    )


def _affinity(update: Update) -> Iterator[Caveat]:
    for plan in sorted_plans(update):
        if plan.affinity_seconds and plan.has_endpoints:
            yield Caveat(
                f"session affinity remembers {_REMEMBERED} clients of each endpoint, unless xt_recent was"
                " loaded with another ip_list_tot",
                plan.key,
            )
