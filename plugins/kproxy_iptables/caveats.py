"""What this mode does not do as a Service asks, or as other modes do. Pure."""

from collections.abc import Iterator, Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports, of_unclaimed_ports, sorted_plans
from kproxy_core.model.address import Family

_REMEMBERED = 100
"""Clients of each endpoint: net/netfilter/xt_recent.c, the default of ip_list_tot."""


def caveats(update: Update, *, localhost_node_ports: bool) -> Sequence[Caveat]:
    """Node ports on loopback are for IPv4 alone, and only with *localhost_node_ports*."""
    node = update.node
    loopback = localhost_node_ports and node.family is Family.IPV4 and node.node_ports_on_loopback
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
