"""Requirements of the mode, tried in the kernel wherever that is harmless."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kproxy_core.backend.api import BackendSettings, Detection, Requirement, Trial
from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import privileges
from kproxy_core.host.attempts import Attempts
from kproxy_core.host.modules import Modules, kernel_version
from kproxy_core.host.nftables.objects import OWNER, PERSIST, Command
from kproxy_core.model.address import Cidr, Family, Protocol, parse_cidr
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_nftables import skeleton
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import Template
from kproxy_nftables.questions.features import (
    FEATURES,
    FLOW_OFFLOAD,
    PERMISSION,
    Feature,
    is_permission,
    trial_of,
)
from kproxy_nftables.settings import read_settings

_Run = Callable[[Sequence[Command]], None]

_MODE = "nftables"
_OLDEST_KERNEL = (5, 13)
"""Required by kube-proxy 1.36 (pkg/proxy/nftables/proxier.go); distributions backport to older ones."""
_BASE = ("nfnetlink", "nf_tables")
_OPTIONS = {"nfnetlink": "CONFIG_NETFILTER_NETLINK", "nft_chain_nat": "CONFIG_NFT_NAT"}
_POD_CIDR: dict[Family, Cidr] = {
    Family.IPV4: parse_cidr("192.0.2.0/24"),
    Family.IPV6: parse_cidr("2001:db8::/32"),
}
TEMPLATES = tuple(
    Template(protocol, policy, cluster, local, sticky, node_port)
    for protocol in Protocol
    for policy, cluster, local in (("cluster", 1, 0), ("local", 0, 1), ("external-local", 1, 1))
    for sticky in (False, True)
    for node_port in (False, True)
)


def detect(settings: BackendSettings, trial: Trial | None, *, load_modules: bool) -> Detection:
    """Check privileges, then try each feature, and the rules themselves.

    Without a *trial*, the kernel checks the rules without applying them. Raises InvalidOption.
    """
    options = read_settings(settings)
    allowed = "CAP_NET_ADMIN" in privileges.held()
    why_not = "permission denied" if trial is None else trial.enter()
    inside = not why_not
    kernel = Kernel()
    run = kernel.run if inside else kernel.check
    attempts = Attempts(Modules(_OPTIONS), why_not="" if allowed else why_not, load_modules=load_modules)
    try:
        rules = [
            rule
            for family in settings.families
            for rule in _tried(run, attempts, family, FEATURES if inside else ())
        ]
        optional = [
            _as_option(_try(run, attempts, family, FLOW_OFFLOAD), "flows are forwarded without it")
            for family in settings.families if inside and options.flowtable
        ]
        if settings.own_tables and inside:
            owned = trial_of(Family.IPV4, (), flags=OWNER | PERSIST)
            optional.append(_as_option(
                attempts.attempt("tables that only kproxy can change", _BASE, partial(_refusal, run, owned)),
                "any process can change the rules, and kproxy repairs them"))
    finally:
        kernel.close()
    return Detection(_MODE, (_version(rules), _privilege(allowed), *rules, *optional))


def _tried(
    run: _Run, attempts: Attempts, family: Family, features: Iterable[Feature]
) -> Iterator[Requirement]:
    """Try each of *features*, then all rules together."""
    ip = family.ip
    for feature in features:
        yield _try(run, attempts, family, feature)
    node = NodeView(
        family=family, name="check", local_source=LocalSource(cidr=_POD_CIDR[family]),
        node_ports_anywhere=True,
    )
    objects = skeleton.layout(node, TEMPLATES, {}).values()
    needed = dict.fromkeys(module for feature in FEATURES for module in feature.modules_of(family))
    yield attempts.attempt(
        f"{ip}: all rules of the mode", _BASE, partial(_refusal, run, trial_of(family, objects)),
        rests_on=tuple(needed))


def _try(run: _Run, attempts: Attempts, family: Family, feature: Feature) -> Requirement:
    return attempts.attempt(
        f"{family.ip}: {feature.what}", feature.modules_of(family),
        partial(_refusal, run, trial_of(family, feature.objects(family))), rests_on=_BASE)  # fmt: skip


def _as_option(found: Requirement, consequence: str) -> Requirement:
    """Return the finding about a feature that the mode can do without, with the *consequence*."""
    if found.met:
        return found
    without = "; ".join(filter(None, (found.found, found.remedy, consequence)))
    return Requirement(f"{found.what}, if available", True, without, guessed=found.guessed)


def _privilege(held: bool) -> Requirement:
    return Requirement("CAP_NET_ADMIN", held, "held" if held else "not held", "" if held else PERMISSION)


def _version(rules: Sequence[Requirement]) -> Requirement:
    """Return the requirement of a kernel version. An older kernel that accepts all rules meets it as well."""
    needed = ".".join(map(str, _OLDEST_KERNEL))
    version = kernel_version()
    found = f"Linux {'.'.join(map(str, version))}"
    if version >= _OLDEST_KERNEL:
        return Requirement(f"Linux {needed} or newer", True, found)
    if all(rule.met and not rule.guessed for rule in rules):
        return Requirement(f"Linux {needed} or newer", True, f"{found}, which has what is needed")
    return Requirement(f"Linux {needed} or newer", False, found, f"use Linux {needed} or newer", guessed=True)


def _refusal(run: _Run, commands: Sequence[Command]) -> str:
    try:
        run(commands)
    except SyncFailed as refused:
        return "permission denied" if is_permission(refused) else str(refused)
    return ""
