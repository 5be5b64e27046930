"""Deviations of this mode from the Service API and from other modes. Pure."""

from collections.abc import Iterator, Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports, sorted_plans
from kproxy_core.model.address import Protocol
from kproxy_core.plan.service_plan import ServicePlan

TIME_WAIT = 120
"""Seconds that IPVS keeps a TCP connection in this state, net/netfilter/ipvs/ip_vs_proto_tcp.c."""


def caveats(update: Update, *, scheduler: str) -> Sequence[Caveat]:
    """Return the caveats of *update*: node ports at interface addresses only, affinity by persistence."""
    plans = sorted_plans(update)
    return (
        *of_node_ports(update, loopback=False, any_local_address=False),
        *_of_all(plans, scheduler),
        *(caveat for plan in plans for caveat in _of_service_port(plan)),
    )


def _of_all(plans: Sequence[ServicePlan], scheduler: str) -> Iterator[Caveat]:
    if not plans:
        return
    # Other modes choose endpoints in turn or at random, which rr matches.
    yield Caveat(f"connections are scheduled by {scheduler}", lost=False, only_here=scheduler != "rr")
    if any(plan.cluster_ip is not None or plan.external_addresses for plan in plans):
        yield Caveat(
            "ClusterIPs and external addresses are addresses of this node and answer pings", lost=False)


def _of_service_port(plan: ServicePlan) -> Iterator[Caveat]:
    if plan.key.protocol is Protocol.SCTP:
        yield Caveat("SCTP is served if the IPVS of this kernel has it", plan.key, lost=False)
    if not plan.affinity_seconds:
        return
    if len(tuple(plan.frontends())) > 1:
        yield Caveat("session affinity is kept for each frontend by itself", plan.key)
    if plan.external_policy_local and (plan.external_addresses or plan.node_port):
        yield Caveat(
            "session affinity of this node and its pods at external frontends ends when endpoints change",
            plan.key,
        )
    if plan.key.protocol is Protocol.TCP and plan.affinity_seconds < TIME_WAIT:
        yield Caveat(
            f"session affinity outlasts its {plan.affinity_seconds} s while connections of the client are"
            " in TIME_WAIT",
            plan.key, lost=False,
        )  # fmt: skip
