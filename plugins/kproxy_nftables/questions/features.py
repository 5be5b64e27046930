"""The nf_tables features that the rules need, each with the smallest objects that require it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host.nftables.objects import (
    DORMANT,
    OWNER,
    PERSIST,
    Chain,
    Command,
    Container,
    Flowtable,
    Object,
    Place,
    Table,
)
from kproxy_core.host.nftables.rules import (
    DESTINATION_PORT,
    DESTINATION_PORT_OF,
    DROP,
    L4_PROTOCOL,
    MASQUERADE,
    RESET,
    VERDICT,
    among,
    ct_state,
    ct_status,
    destination_address,
    dnat_to_endpoint,
    equals,
    is_local,
    offload,
    original_destination,
    random_number,
    reject,
    vmap,
)
from kproxy_core.model.address import Family, Protocol
from kproxy_nftables.kernel import Kernel

TABLE = "kproxy-check"
"""Exists only within a check. No packet passes through it."""

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
    return [Chain(hook, (), Place("nat", hook, priority)) for hook, priority in places]


def _verdict_map(family: Family) -> list[Object]:
    key = (destination_address(family), L4_PROTOCOL, DESTINATION_PORT)
    return [Container("vips", key, (VERDICT,)), Chain("rules", ((vmap(key, "vips"),),))]


def _random_endpoint(family: Family) -> list[Object]:
    address, port = destination_address(family), DESTINATION_PORT_OF[Protocol.TCP]
    key = (address, port, random_number(2))
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
