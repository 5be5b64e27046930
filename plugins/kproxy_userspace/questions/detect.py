"""Requirements of the mode, tried with the programs that it would use."""

from functools import partial

from msgspec.structs import replace

from kproxy_core.backend.api import BackendSettings, Detection, Requirement, Trial
from kproxy_core.host.attempts import Attempts, problem_of
from kproxy_core.host.modules import Modules
from kproxy_core.model.address import Family, format_address
from kproxy_userspace.kernel.portals import NftPortals
from kproxy_userspace.settings import read_settings
from kproxy_xtables import requirements
from kproxy_xtables.requirements import Feature
from kproxy_xtables.tables import Tables

_MODE = "userspace"
_ROOTLESS = "or serve without portals: --userspace-listen ADDRESS"
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

    Without a *trial*, most findings are concluded from kernel modules. Raises InvalidOption.
    """
    options = read_settings(settings)
    if options.listen is not None:
        where = format_address(options.listen)
        return Detection(_MODE, (Requirement("an address", True, f"ports at {where}, no portals"),))
    modules = Modules(requirements.KERNEL_OPTIONS)
    installed, variant = requirements.check_programs(modules, load_modules=load_modules)
    found = [_rootless(requirements.check_privileges(variant))]
    attempts = Attempts(modules, why_not="only looked at" if trial is None else trial.enter(),
                        load_modules=load_modules)  # fmt: skip
    by_iptables = [installed]
    if variant is not None:
        for family in settings.families:
            by_iptables += requirements.try_rules(Tables(family, variant), attempts, _FEATURES)
    if all(finding.met for finding in by_iptables):
        found += by_iptables
    else:
        found += [_without_iptables(family, attempts) for family in settings.families]
    return Detection(_MODE, tuple(found))


def _without_iptables(family: Family, attempts: Attempts) -> Requirement:
    check = NftPortals(family, None).check
    return _rootless(attempts.attempt(
        f"{family.label}: redirection by nf_tables", _NFT_MODULES, partial(problem_of, check),
        "install iptables, or use a kernel with nf_tables and its NAT",
    ))  # fmt: skip


def _rootless(finding: Requirement) -> Requirement:
    """Add the remedy of serving without portals, unless the finding is met."""
    if finding.met:
        return finding
    return replace(finding, remedy=f"{finding.remedy}, {_ROOTLESS}" if finding.remedy else _ROOTLESS)
