"""Requirements and deviations of the mode. Each nf_tables feature is tried with the smallest objects that
need it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from kproxy_core.contract import (
    HASH_SEED,
    BackendSettings,
    Caveat,
    Cidr,
    Detection,
    Family,
    LocalSource,
    NodeView,
    Protocol,
    Requirement,
    SyncFailed,
    Trial,
    Update,
    parse_cidr,
)
from kproxy_core.contract.caveats import of_node_ports, of_removed_endpoints
from kproxy_core.linux import process
from kproxy_core.linux.modules import Modules, kernel_version
from kproxy_core.linux.trial import FeatureProbe
from kproxy_core.nft.messages import Command
from kproxy_core.nft.objects import DORMANT, OWNER, PERSIST, Chain, Container, Flowtable, Hook, Object, Table
from kproxy_core.nft.rules import (
    DESTINATION_PORT,
    DESTINATION_PORT_OF,
    DROP,
    L4_PROTOCOL,
    MASQUERADE,
    RESET,
    VERDICT,
    Field,
    among,
    ct_state,
    ct_status,
    destination_address,
    dnat_to_endpoint,
    equals,
    hashed,
    is_local,
    offload,
    original_destination,
    random_number,
    reject,
    source_address,
    vmap,
)
from kproxy_nftables import skeleton
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import Template
from kproxy_nftables.settings import read_settings

# Features of nf_tables.

TABLE = "kproxy-check"
"""A table that exists only during a check. No packet passes through it."""

PERMISSION = "run as root or with CAP_NET_ADMIN"


class Feature(NamedTuple):
    what: str
    modules: tuple[str, ...]
    """Modules that provide it; ``{v}`` is 4 or 6."""
    objects: Callable[[Family], Sequence[Object]]
    """Return objects that need it."""

    def modules_of(self, family: Family) -> tuple[str, ...]:
        version = "4" if family is Family.IPV4 else "6"
        return tuple(module.format(v=version) for module in self.modules)


def trial_of(family: Family, objects: Iterable[Object], *, flags: int = 0) -> list[Command]:
    """Return one transaction that creates a table of *objects*, with *flags*, and deletes it."""
    table = Table(family, TABLE, flags=flags)
    return [table.create(), *table.write(objects), table.delete()]


def _nat_chains(_: Family) -> list[Object]:
    places = (("prerouting", -100), ("output", -100), ("postrouting", 100))
    return [Chain(hook, (), Hook("nat", hook, priority)) for hook, priority in places]


def _verdict_map(family: Family) -> list[Object]:
    key = (destination_address(family), L4_PROTOCOL, DESTINATION_PORT)
    return [Container("vips", key, (VERDICT,)), Chain("rules", ((vmap(key, "vips"),),))]


def _random_endpoint(family: Family) -> list[Object]:
    return _choice(family, random_number(2))


def _choice(family: Family, number: Field) -> list[Object]:
    address, port = destination_address(family), DESTINATION_PORT_OF[Protocol.TCP]
    key = (address, port, number)
    endpoints = Container("endpoints", (address, port, random_number(1)), (address, port))
    return [endpoints, Chain("rules", ((dnat_to_endpoint(family, key, "endpoints"),),))]


def _local_addresses(_: Family) -> list[Object]:
    return [Chain("rules", ((is_local("daddr"), DROP),))]


def _masquerade(_: Family) -> list[Object]:
    return [Chain("rules", ((MASQUERADE,),))]


def _reject(family: Family) -> list[Object]:
    return [Chain("rules", ((equals(L4_PROTOCOL, Protocol.TCP), RESET), (reject(family),)))]


def _conntrack(family: Family) -> list[Object]:
    known = among((original_destination(family),), "known")
    rule = (ct_state("new"), ct_status("dnat"), known, DROP)
    return [Container("known", (destination_address(family),)), Chain("rules", (rule,))]


def _networks(family: Family) -> list[Object]:
    key = (destination_address(family),)
    return [Container("networks", key, interval=True), Chain("rules", ((among(key, "networks"), DROP),))]


def _flowtable(_: Family) -> list[Object]:
    return [Flowtable("flows", ()), Chain("rules", ((offload("flows"),),))]


FEATURES = (
    Feature("chains of type nat", ("nft_chain_nat",), _nat_chains),
    Feature("verdict map of addresses and ports", (), _verdict_map),
    Feature("dnat by a random number in a concatenation", ("nft_numgen", "nft_nat"), _random_endpoint),
    Feature("fib lookup of local addresses", ("nft_fib", "nft_fib_ipv{v}"), _local_addresses),
    Feature("masquerade", ("nft_masq",), _masquerade),
    Feature("reject", ("nft_reject", "nft_reject_ipv{v}"), _reject),
    Feature("conntrack state and original destination", ("nft_ct", "nf_conntrack"), _conntrack),
    Feature("sets of networks", (), _networks),
)

FLOW_OFFLOAD = Feature(
    "flowtable", ("nf_flow_table", "nf_flow_table_inet", "nft_flow_offload"), _flowtable)
"""Needed by the option `flowtable` only."""


HASH = Feature("choice of an endpoint by jhash", ("nft_hash",), lambda family: _choice(
    family, hashed((source_address(family),), 2, HASH_SEED)))
"""Needed by Services with the annotation ``kproxy.dev/hash`` only."""


def can_own(kernel: Kernel) -> bool:
    """Return whether only its owner can change a table here, which outlives that owner (Linux 6.9)."""
    table = Table(Family.IPV4, TABLE, flags=DORMANT | OWNER | PERSIST)
    try:
        kernel.check([table.create()])
    except SyncFailed:
        return False
    return True


def lacking(kernel: Kernel, families: Sequence[Family], features: Sequence[Feature] = FEATURES) -> list[str]:
    """Return the features that *kernel* lacks. Makes no lasting change, and never affects a packet."""
    with suppress(SyncFailed):
        kernel.run([
            command for family in families for feature in features
            for command in trial_of(family, feature.objects(family), flags=DORMANT)
        ])  # fmt: skip
        return []
    problems = []
    for family in families:
        for feature in features:
            try:
                kernel.run(trial_of(family, feature.objects(family), flags=DORMANT))
            except SyncFailed as refused:
                if is_permission(refused):
                    return [f"permission denied, {PERMISSION}"]
                problems.append(f"no {feature.what} in family {family.ip} ({refused})")
    return problems


def is_permission(refused: SyncFailed) -> bool:
    """Return True if the kernel refused for lack of privileges."""
    return "Operation not permitted" in str(refused)


# Requirements, tried in the kernel wherever that is harmless.

_Run = Callable[[Sequence[Command]], None]

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
    allowed = "CAP_NET_ADMIN" in process.network_privileges()
    why_not = "permission denied" if trial is None else trial.enter()
    inside = not why_not
    kernel = Kernel()
    run = kernel.run if inside else kernel.check
    attempts = FeatureProbe(Modules(_OPTIONS), why_not="" if allowed else why_not, load_modules=load_modules)
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
    return Detection((_version(rules), _privilege(allowed), *rules, *optional))


def _tried(
    run: _Run, attempts: FeatureProbe, family: Family, features: Iterable[Feature]
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


def _try(run: _Run, attempts: FeatureProbe, family: Family, feature: Feature) -> Requirement:
    return attempts.attempt(
        f"{family.ip}: {feature.what}", feature.modules_of(family),
        partial(_refusal, run, trial_of(family, feature.objects(family))), rests_on=_BASE)  # fmt: skip


def _as_option(found: Requirement, consequence: str) -> Requirement:
    """Return the finding about an optional feature, with the *consequence* of its absence."""
    if found.met:
        return found
    without = "; ".join(filter(None, (found.found, found.remedy, consequence)))
    return Requirement(f"{found.what}, if available", True, without, guessed=found.guessed)


def _privilege(held: bool) -> Requirement:
    found = "held" if held else "not held over this network namespace"
    return Requirement("CAP_NET_ADMIN", held, found, "" if held else PERMISSION)


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


# Deviations.

def caveats(update: Update) -> Sequence[Caveat]:
    """Return the node ports that this mode does not serve.

    On loopback relays serve them, as in kube-proxy from 1.37 on (KEP-6032), or nothing does.
    """
    return (
        *of_node_ports(update, loopback=False, any_local_address=True, wants_relays=True),
        *of_removed_endpoints(update),
    )
