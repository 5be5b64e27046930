"""Requirements of the mode, tried with the programs that it would use, and its deviations."""

from collections.abc import Iterator, Sequence

from kproxy_core.contract import BackendSettings, Caveat, Detection, Family, Trial, Update
from kproxy_core.contract.caveats import of_node_ports, of_removed_endpoints, of_unclaimed_ports, sorted_plans
from kproxy_core.linux.modules import Modules
from kproxy_core.linux.trial import FeatureProbe, sysctl_finding
from kproxy_iptables.settings import Settings, read_settings
from kproxy_iptables.skeleton import serves_loopback
from kproxy_xtables import requirements
from kproxy_xtables.requirements import Feature
from kproxy_xtables.tables import Tables

_FEATURES = (
    requirements.COMMENTS,
    requirements.PORTS,
    Feature("ports of SCTP", ("xt_sctp",), "-p sctp -m sctp --dport 80 -j RETURN"),
    requirements.CONNTRACK,
    requirements.ADDRTYPE,
    Feature("statistic match", ("xt_statistic",), "-m statistic --mode random --probability 0.5 -j RETURN"),
    Feature("recent match", ("xt_recent",),
            "-m recent --name kproxy-check --rcheck --seconds 10800 --reap -j RETURN"),
    requirements.MARKS,
    Feature("DNAT", ("xt_nat",), "-p tcp -m tcp -j DNAT --to-destination {address}:80"),
    requirements.MASQUERADE,
    requirements.REJECT,
)  # fmt: skip


def detect(settings: BackendSettings, trial: Trial | None, *, load_modules: bool) -> Detection:
    """Check privileges, programs and sysctls, then try each table, match and target.

    Without a *trial*, read only the nat tables, and infer the rest from kernel modules.
    """
    modules = Modules(requirements.KERNEL_OPTIONS)
    installed, variant = requirements.check_programs(modules, load_modules=load_modules)
    found = [requirements.check_privileges(variant), installed]
    if read_settings(settings).localhost_node_ports:
        found.append(sysctl_finding("net/ipv4/conf/all/route_localnet", 1,
                                    "set it, or iptables.localhostNodePorts to false"))  # fmt: skip
    found += requirements.check_other_programs(variant, settings.families)
    if variant is not None:
        why_not = "only looked at" if trial is None else trial.enter()
        for family in settings.families:
            attempts = FeatureProbe(modules, why_not=why_not, load_modules=load_modules)
            found += requirements.try_rules(
                Tables(family, variant), attempts, _FEATURES, ("filter", "mangle"))
    return Detection(tuple(found))


# Deviations. Pure.

_REMEMBERED = 100
"""Limit for the clients of each endpoint: the default of ip_list_tot (net/netfilter/xt_recent.c)."""


def caveats(update: Update, settings: Settings) -> Sequence[Caveat]:
    loopback = serves_loopback(update.node, enabled=settings.localhost_node_ports)
    return (
        *of_node_ports(update, loopback=loopback, any_local_address=True,
                       wants_relays=update.family is Family.IPV6),
        *of_unclaimed_ports(update),
        *of_removed_endpoints(update),
        *_affinity(update),
        *(Caveat(
            f"the annotation kproxy.dev/hash: {plan.hash_by} has no effect, endpoints are chosen at random",
            plan.key)
          for plan in sorted_plans(update) if plan.hash_by),
    )  # fmt: skip


def _affinity(update: Update) -> Iterator[Caveat]:
    for plan in sorted_plans(update):
        if plan.affinity_seconds and plan.has_endpoints:
            yield Caveat(
                f"session affinity remembers {_REMEMBERED} clients of each endpoint, unless xt_recent was"
                " loaded with another ip_list_tot",
                plan.key,
            )
