"""Requirements of the mode, tried with its programs and messages, and its deviations."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from kproxy_core.contract import (
    BackendSettings,
    Caveat,
    Detection,
    Family,
    HostError,
    Protocol,
    Requirement,
    ServicePlan,
    Trial,
    Update,
)
from kproxy_core.contract.caveats import of_node_ports, of_removed_endpoints, sorted_plans
from kproxy_core.linux import packages, programs
from kproxy_core.linux.modules import Modules, kernel_version
from kproxy_core.linux.trial import FeatureProbe, problem_of, sysctl_finding
from kproxy_ipvs import names
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.servers import try_server
from kproxy_ipvs.settings import Settings, read_settings
from kproxy_ipvs.wanted import schedulers
from kproxy_xtables import requirements
from kproxy_xtables.requirements import Feature
from kproxy_xtables.tables import Tables

_OLDEST_IPSET = (6, 0)
_VERSION = re.compile(r"v(\d+)\.(\d+)")
_CONNTRACK_IN_ONE = (4, 19)
"""The first Linux with one module for both families."""

_SET_MODULES = {
    "hash:ip": "ip_set_hash_ip", "hash:ip,port": "ip_set_hash_ipport",
    "hash:ip,port,ip": "ip_set_hash_ipportip", "hash:ip,port,net": "ip_set_hash_ipportnet",
    "bitmap:port": "ip_set_bitmap_port",
}  # fmt: skip


def detect(settings: BackendSettings, trial: Trial | None, *, load_modules: bool) -> Detection:
    """Check privileges, programs and sysctls, then try virtual servers, the device, sets and rules.

    Without a *trial* namespace, most findings are inferred from kernel modules. Raises InvalidOption.
    """
    scheduler = read_settings(settings).scheduler
    modules = Modules(requirements.KERNEL_OPTIONS)
    installed, variant = requirements.check_programs(modules, load_modules=load_modules)
    found = [
        requirements.check_privileges(variant),
        _ipset(modules, load_modules=load_modules),
        installed,
        _package(),
        sysctl_finding("net/ipv4/ip_forward", 1, "set it to 1"),
    ]
    has_programs = all(finding.met for finding in found[1:3])
    found += requirements.check_other_programs(variant, settings.families)
    why_not = "only looked at" if trial is None else trial.enter()
    attempts = FeatureProbe(modules, why_not=why_not, load_modules=load_modules)
    found += _kernel(attempts, scheduler, settings.families)
    if has_programs and variant is not None:
        for family in settings.families:
            found += _rules(Tables(family, variant), attempts)
    return Detection(tuple(found))


def _kernel(attempts: FeatureProbe, scheduler: str, families: tuple[Family, ...]) -> Iterator[Requirement]:
    conntrack = "nf_conntrack" if kernel_version() >= _CONNTRACK_IN_ONE else "nf_conntrack_ipv4"
    for family, name in product(families, schedulers(scheduler)):
        yield attempts.attempt(
            f"{family.label}: virtual server with scheduler {name}",
            ("ip_vs", f"ip_vs_{name}", conntrack),
            partial(problem_of, partial(try_server, name, family)))  # fmt: skip
    yield attempts.attempt("dummy interface", ("dummy",), partial(problem_of, device.ensure))
    for family in families:
        for kind in {kind.type: kind for kind in names.SETS}.values():
            yield attempts.attempt(
                f"{family.label}: set of type {kind.type}", (_SET_MODULES[kind.type],),
                partial(problem_of, partial(sets.create, family, [kind])),
                rests_on=("nfnetlink", "ip_set"))  # fmt: skip


def _rules(tables: Tables, attempts: FeatureProbe) -> Iterator[Requirement]:
    set_name = names.IPVS_IPS.full_name(tables.family)
    features = (
        Feature("set match", ("xt_set", "ip_set_hash_ip"), f"-m set --match-set {set_name} dst -j RETURN"),
        requirements.COMMENTS, requirements.CONNTRACK, requirements.ADDRTYPE, requirements.MARKS,
        requirements.MASQUERADE, requirements.REJECT,
    )  # fmt: skip
    return requirements.try_rules(tables, attempts, features, ("filter", "mangle"))


def _package() -> Requirement:
    met = packages.is_installed("pyroute2")
    found, remedy = ("installed", "") if met else ("not installed", packages.installing("ipvs"))
    return Requirement("Python package pyroute2", met, found, remedy)


def _ipset(modules: Modules, *, load_modules: bool) -> Requirement:
    oldest = ".".join(map(str, _OLDEST_IPSET))
    what, remedy = f"ipset {oldest} or newer", f"install ipset {oldest} or newer"
    if not programs.find("ipset"):
        return Requirement(what, False, "not installed", remedy)
    if not load_modules and modules.not_loaded(["nfnetlink", "ip_set"]):
        return Requirement(what, True, "installed; not run, that would load ip_set", guessed=True)
    try:
        said = programs.run("ipset", "--version").stdout
    except HostError as error:
        return Requirement(what, False, str(error), remedy)
    found = _VERSION.search(said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_IPSET:
        return Requirement(what, False, said.strip() or "version unknown", remedy)
    return Requirement(what, True, f"ipset {found[1]}.{found[2]}")


# Deviations. Pure.

TIME_WAIT = 120
"""IPVS's timeout in seconds for this state of a TCP connection (net/netfilter/ipvs/ip_vs_proto_tcp.c)."""


def caveats(update: Update, settings: Settings) -> Sequence[Caveat]:
    """Return the caveats of *update*: node ports at interface addresses only, affinity by persistence."""
    plans = sorted_plans(update)
    return (
        *of_node_ports(update, loopback=False, any_local_address=False, wants_relays=True),
        *of_removed_endpoints(update),
        *_of_all(plans, settings.scheduler),
        *(caveat for plan in plans for caveat in _of_service_port(plan, settings.scheduler)),
    )


def _of_all(plans: Sequence[ServicePlan], scheduler: str) -> Iterator[Caveat]:
    if not plans:
        return
    # Other modes choose endpoints in turn or at random, which rr matches.
    yield Caveat(f"connections are scheduled by {scheduler}", lost=False, only_here=scheduler != "rr")
    if any(plan.cluster_ip is not None or plan.external_addresses for plan in plans):
        yield Caveat(
            "ClusterIPs and external addresses are addresses of this node and answer pings", lost=False)


def _of_service_port(plan: ServicePlan, scheduler: str) -> Iterator[Caveat]:
    if plan.hash_by:
        yield Caveat(
            "IPVS hashes clients in a way of its own: nodes in other modes choose other endpoints", plan.key,
            lost=False)
    elif scheduler == "dh" and (plan.cluster_weights or plan.local_weights or plan.resting):
        yield Caveat(
            "the scheduler dh ignores weights, and connections to endpoints of weight 0 end", plan.key)
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
