"""The requirements of the mode, tried with the programs and messages that the mode uses."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import product

from kproxy_core.backend.api import BackendSettings, Detection, Requirement, Trial
from kproxy_core.host import programs
from kproxy_core.host.attempts import Attempts, problem_of, sysctl_finding
from kproxy_core.host.errors import HostError
from kproxy_core.host.modules import Modules, kernel_version
from kproxy_core.model.address import Family
from kproxy_ipvs import names
from kproxy_ipvs.kernel import device, sets
from kproxy_ipvs.kernel.virtual_servers import try_server
from kproxy_ipvs.settings import read_settings
from kproxy_ipvs.wanted import schedulers
from kproxy_xtables import requirements
from kproxy_xtables.requirements import Feature
from kproxy_xtables.tables import Tables

_MODE = "ipvs"
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

    Without a *trial* namespace, most findings are concluded from kernel modules. Raises InvalidOption.
    """
    scheduler = read_settings(settings).scheduler
    modules = Modules(requirements.KERNEL_OPTIONS)
    installed, variant = requirements.check_programs(modules, load_modules=load_modules)
    found = [
        requirements.check_privileges(variant),
        _ipset(modules, load_modules=load_modules),
        installed,
        sysctl_finding("net/ipv4/ip_forward", 1, "set it to 1"),
    ]
    has_programs = all(finding.met for finding in found[1:3])
    why_not = "only looked at" if trial is None else trial.enter()
    attempts = Attempts(modules, why_not=why_not, load_modules=load_modules)
    found += _kernel(attempts, scheduler, settings.families)
    if has_programs and variant is not None:
        for family in settings.families:
            found += _rules(Tables(family, variant), attempts)
    return Detection(_MODE, tuple(found))


def _kernel(attempts: Attempts, scheduler: str, families: tuple[Family, ...]) -> Iterator[Requirement]:
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


def _rules(tables: Tables, attempts: Attempts) -> Iterator[Requirement]:
    set_name = names.IPVS_IPS.full_name(tables.family)
    features = (
        Feature("set match", ("xt_set", "ip_set_hash_ip"), f"-m set --match-set {set_name} dst -j RETURN"),
        requirements.COMMENTS, requirements.CONNTRACK, requirements.ADDRTYPE, requirements.MARKS,
        requirements.MASQUERADE, requirements.REJECT,
    )  # fmt: skip
    return requirements.try_rules(tables, attempts, features, ("filter", "mangle"))


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
