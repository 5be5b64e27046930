"""Whether this machine can run the mode: tried with the programs that it would use."""

from kproxy_core.backend.api import BackendSettings, Detection, Requirement, Trial
from kproxy_core.host.attempts import Attempts, sysctl_finding
from kproxy_core.host.modules import Modules
from kproxy_iptables.settings import read_settings
from kproxy_xtables import requirements as iptables_check
from kproxy_xtables.requirements import Feature
from kproxy_xtables.tables import Tables

_MODE = "iptables"
_FEATURES = (
    iptables_check.COMMENTS,
    iptables_check.PORTS,
    Feature("ports of SCTP", ("xt_sctp",), "-p sctp -m sctp --dport 80 -j RETURN"),
    iptables_check.CONNTRACK,
    iptables_check.ADDRTYPE,
    Feature("statistic match", ("xt_statistic",),
            "-m statistic --mode random --probability 0.5 -j RETURN"),
    Feature("recent match", ("xt_recent",),
            "-m recent --name kproxy-check --rcheck --seconds 10800 --reap -j RETURN"),
    iptables_check.MARKS,
    Feature("DNAT", ("xt_nat",), "-p tcp -m tcp -j DNAT --to-destination {address}:80"),
    iptables_check.MASQUERADE,
    iptables_check.REJECT,
)  # fmt: skip


def detect(settings: BackendSettings, trial: Trial | None, *, load_modules: bool) -> Detection:
    """Look for privileges, programs and sysctls, then try each table, match and target.

    Outside of a *trial* only the nat tables are looked at; the rest is concluded from modules.
    """
    modules = Modules(iptables_check.OPTIONS)
    installed, variant = iptables_check.installed(modules, load_modules=load_modules)
    found = [iptables_check.privilege(variant), installed]
    if read_settings(settings).localhost_node_ports:
        found.append(sysctl_finding("net/ipv4/conf/all/route_localnet", 1,
                                    "set it, or iptables.localhostNodePorts to false"))  # fmt: skip
    if variant is not None:
        why_not = "only looked at" if trial is None else trial.enter()
        for family in settings.families:
            attempts = Attempts(modules, why_not=why_not, load_modules=load_modules)
            found += iptables_check.rules(
                Tables(family, variant), attempts, _FEATURES, ("filter", "mangle"))
    return Detection(_MODE, tuple(Requirement(*finding) for finding in found))
