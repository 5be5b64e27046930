"""Whether this machine can run the mode."""

from kproxy_core.backend.api import BackendSettings, Detection, Requirement
from kproxy_core.backend.errors import Unsupported
from kproxy_core.host import programs
from kproxy_core.host.programs import ProgramFailed
from kproxy_core.model.address import Family, format_address
from kproxy_userspace.batch import nft_skeleton
from kproxy_userspace.kernel import find_tables
from kproxy_userspace.settings import read_settings

_MODE = "userspace"
_ROOTLESS = "or serve without portals: --userspace-listen ADDRESS"


def detect(settings: BackendSettings) -> Detection:
    """Ask for the nat table of each family, or for nothing at all when there are no portals."""
    try:
        options = read_settings(settings)
    except Unsupported as wrong:
        return Detection(_MODE, (Requirement("options", False, str(wrong)),))
    if options.listen is not None:
        where = format_address(options.listen)
        return Detection(_MODE, (Requirement("an address", True, f"ports at {where}, no portals"),))
    return Detection(_MODE, tuple(_portals(family) for family in settings.families))


def _portals(family: Family) -> Requirement:
    what = f"redirection for {family.label}"
    attempts: list[tuple[str, str]] = []
    tables = find_tables(family)
    if tables is not None:
        attempts.append((tables.program, tables.problem()))
    if programs.find("nft"):
        attempts.append(("nft", _nft_problem(family)))
    for program, problem in attempts:
        if not problem:
            return Requirement(what, True, f"{program} redirects {family.label}")
    if not attempts:
        return Requirement(what, False, "no iptables, no nft", f"install iptables or nftables, {_ROOTLESS}")
    found = "; ".join(f"{program}: {problem}" for program, problem in attempts)
    denied = "ermission denied" in found or "not permitted" in found
    remedy = "run as root or with CAP_NET_ADMIN" if denied else "needs a kernel with netfilter NAT"
    return Requirement(what, False, found, f"{remedy}, {_ROOTLESS}")


def _nft_problem(family: Family) -> str:
    try:
        programs.output("nft", "-c", "-f", "-", stdin=nft_skeleton(family))
    except ProgramFailed as error:
        return str(error)
    return ""
