"""Whether this machine can run the mode."""

from kproxy_core.backend.api import BackendSettings, Detection, Requirement
from kproxy_core.host.iptables import Tables
from kproxy_core.host.iptables_variant import NoVariant, find_variant

_MODE = "iptables"


def detect(settings: BackendSettings) -> Detection:
    """Look for the programs, then for the nat table of each family."""
    try:
        variant = find_variant()
    except NoVariant as missing:
        programs = Requirement("iptables", False, str(missing), "install iptables 1.8 or newer")
        return Detection(_MODE, (programs,))
    found = [Requirement("iptables", True, str(variant))]
    for family in settings.families:
        what = f"nat table for {family.label}"
        tables = Tables(family, variant)
        problem = tables.problem()
        if problem and not tables.missing():
            found.append(Requirement(what, False, problem, "run as root or with CAP_NET_ADMIN"))
        elif problem:
            found.append(Requirement(what, False, problem, "needs a kernel with netfilter NAT for it"))
        else:
            found.append(Requirement(what, True, f"{what} present"))
    return Detection(_MODE, tuple(found))
