"""Requirements of the mode, tried with the programs that it would use, and its deviations."""

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from kproxy_core.contract import (
    Address,
    BackendSettings,
    Caveat,
    Detection,
    Family,
    Protocol,
    Requirement,
    ServicePlan,
    Trial,
    Update,
    format_address,
)
from kproxy_core.contract.caveats import of_node_ports, of_unclaimed_ports, sorted_plans
from kproxy_core.linux.modules import Modules
from kproxy_core.linux.trial import FeatureProbe, problem_of
from kproxy_userspace.kernel.portals import NftPortals
from kproxy_userspace.settings import ROOTLESS, Settings, read_settings
from kproxy_xtables import requirements
from kproxy_xtables.requirements import Feature
from kproxy_xtables.tables import Tables

_FEATURES = (
    requirements.COMMENTS,
    requirements.PORTS,
    requirements.CONNTRACK,
    requirements.ADDRTYPE,
    Feature("physdev match", ("xt_physdev",), "-m physdev ! --physdev-is-in -j RETURN"),
    Feature("REDIRECT", ("xt_REDIRECT",), "-p tcp -m tcp -j REDIRECT --to-ports 80"),
)
_NFT_MODULES = ("nf_tables", "nft_chain_nat", "nft_redir", "nft_fib", "nft_fib_ipv4", "nft_fib_ipv6")


def detect(settings: BackendSettings, trial: Trial | None, *, load_modules: bool) -> Detection:
    """Try to redirect each family with iptables, or else over netlink. Without portals nothing is needed.

    Without a *trial*, most findings are inferred from kernel modules. Raises InvalidOption.
    """
    options = read_settings(settings)
    if options.listen is not None:
        where = format_address(options.listen)
        return Detection((Requirement("an address", True, f"ports at {where}, no portals"),))
    modules = Modules(requirements.KERNEL_OPTIONS)
    installed, variant = requirements.check_programs(modules, load_modules=load_modules)
    found = [_rootless(requirements.check_privileges(variant))]
    by_iptables = [installed, *requirements.check_other_programs(variant, settings.families)]
    attempts = FeatureProbe(modules, why_not="only looked at" if trial is None else trial.enter(),
                        load_modules=load_modules)  # fmt: skip
    if variant is not None:
        for family in settings.families:
            by_iptables += requirements.try_rules(Tables(family, variant), attempts, _FEATURES)
    if all(finding.met for finding in by_iptables):
        found += by_iptables
    else:
        found += [_without_iptables(family, attempts) for family in settings.families]
    return Detection(tuple(found))


def _without_iptables(family: Family, attempts: FeatureProbe) -> Requirement:
    check = NftPortals(family, None).check
    return _rootless(attempts.attempt(
        f"{family.label}: redirection by nf_tables", _NFT_MODULES, partial(problem_of, check),
        "install iptables, or use a kernel with nf_tables and its NAT",
    ))  # fmt: skip


def _rootless(finding: Requirement) -> Requirement:
    """Add the remedy of serving without portals, unless the finding is met."""
    if finding.met:
        return finding
    return replace(finding, remedy=f"{finding.remedy}, {ROOTLESS}" if finding.remedy else ROOTLESS)


# Deviations. Pure.

def caveats(update: Update, settings: Settings) -> Sequence[Caveat]:
    plans = sorted_plans(update)
    return (
        *_of_addresses(update, settings.listen),
        *_of_all(plans, settings.of_workers.udp_idle),
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
    if plan.avoids_silent:
        yield Caveat(
            "silent endpoints are not put into quarantine: a relay tries another one after 250 ms",
            plan.key, lost=False)  # fmt: skip
    # A plan with only a ClusterIP has no endpoints on other nodes, so the policy is respected.
    if plan.internal_policy_local and (plan.node_port or plan.external_addresses):
        yield Caveat("the internal traffic policy Local is ignored", plan.key)
    if plan.external_policy_local:
        yield Caveat("the external traffic policy Local is ignored", plan.key)
