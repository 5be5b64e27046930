"""Deviations of this mode from the Service API and from other modes. Pure."""

from collections.abc import Iterator, Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports, of_unclaimed_ports, sorted_plans
from kproxy_core.model.address import Address, Protocol, format_address
from kproxy_core.plan.service_plan import ServicePlan


def caveats(update: Update, *, listen: Address | None, udp_idle_seconds: float) -> Sequence[Caveat]:
    """Return all deviations. *listen* and *udp_idle_seconds* are those of `settings.Settings`."""
    plans = sorted_plans(update)
    return (
        *_of_addresses(update, listen),
        *_of_all(plans, udp_idle_seconds),
        *(caveat for plan in plans for caveat in _of_service_port(plan)),
    )


def _of_addresses(update: Update, listen: Address | None) -> Iterator[Caveat]:
    if listen is None:
        yield from of_node_ports(update, loopback=update.node.node_ports_on_loopback, any_local_address=True)
        yield from of_unclaimed_ports(update)
    elif not update.plans:
        return
    elif len(listen) == update.family.size:
        yield Caveat(f"Services are served at {format_address(listen)} and at no address of their own")
    else:
        yield Caveat(f"{update.family.label} Services are not served")


def _of_all(plans: Sequence[ServicePlan], udp_idle_seconds: float) -> Iterator[Caveat]:
    protocols = {plan.key.protocol for plan in plans}
    if protocols - {Protocol.SCTP}:
        yield Caveat("endpoints see an address of this node as that of every client")
        yield Caveat("connections end with the kproxy process, and none are made until it runs again")
    if Protocol.UDP in protocols:
        yield Caveat(
            f"a UDP client that was idle for {udp_idle_seconds:g} s may reach another endpoint", lost=False)


def _of_service_port(plan: ServicePlan) -> Iterator[Caveat]:
    if plan.key.protocol is Protocol.SCTP:
        yield Caveat("SCTP is not relayed", plan.key)
        return
    # A plan with only a ClusterIP has no endpoints on other nodes, so the policy is respected.
    if plan.internal_policy_local and (plan.node_port or plan.external_addresses):
        yield Caveat("the internal traffic policy Local is ignored", plan.key)
    if plan.external_policy_local:
        yield Caveat("the external traffic policy Local is ignored", plan.key)
