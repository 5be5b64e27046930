"""The nf_tables features that the rules need, each with the smallest text that requires it."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.model.address import Family
from kproxy_nftables.kernel import Kernel

TABLE = "kproxy-check"
"""Exists only within a check. No packet passes through it."""

PERMISSION = "run as root or with CAP_NET_ADMIN"


class Feature(NamedTuple):
    what: str
    modules: tuple[str, ...]
    """Modules that provide it; ``{v}`` is 4 or 6."""
    lines: tuple[str, ...]
    """Commands that need it; ``{ip}`` is the family, ``{t}`` the table, ``{r}`` begins a rule."""

    def modules_of(self, family: Family) -> tuple[str, ...]:
        version = "4" if family is Family.IPV4 else "6"
        return tuple(module.format(v=version) for module in self.modules)

    def text(self, family: Family, *, flags: str = "") -> str:
        """Return the commands that create a table with this feature only. *flags* are the table's."""
        ip = family.ip
        where = f"{ip} {TABLE}"
        head = (f"add table {where} {{ {flags} }}", f"add chain {where} rules")
        lines = (line.format(ip=ip, t=where, r=f"add rule {where} rules") for line in self.lines)
        return "".join(f"{line}\n" for line in (*head, *lines))


FEATURES = (
    Feature("chains of type nat", ("nft_chain_nat",), tuple(
        f"add chain {{t}} {hook} {{{{ type nat hook {hook} priority {priority}; }}}}"
        for hook, priority in (("prerouting", -100), ("output", -100), ("postrouting", 100))
    )),
    Feature("verdict map of addresses and ports", (), (
        "add map {t} vips {{ typeof {ip} daddr . meta l4proto . th dport : verdict; }}",
        "{r} {ip} daddr . meta l4proto . th dport vmap @vips",
    )),
    Feature("dnat by a random number in a concatenation", ("nft_numgen", "nft_nat"), (
        "add map {t} endpoints"
        " {{ typeof {ip} daddr . tcp dport . numgen random mod 1 : {ip} daddr . tcp dport; }}",
        "{r} dnat {ip} to {ip} daddr . tcp dport . numgen random mod 2 map @endpoints",
    )),
    Feature("fib lookup of local addresses", ("nft_fib", "nft_fib_ipv{v}"), (
        "{r} fib daddr type local drop",
    )),
    Feature("masquerade", ("nft_masq",), ("{r} masquerade fully-random",)),
    Feature("reject", ("nft_reject", "nft_reject_ipv{v}"), (
        "{r} meta l4proto tcp reject with tcp reset", "{r} reject",
    )),
    Feature("conntrack state and original destination", ("nft_ct", "nf_conntrack"), (
        "add set {t} known {{ typeof {ip} daddr; }}",
        "{r} ct state new ct status dnat ct original {ip} daddr @known return",
    )),
    Feature("sets of networks", (), (
        "add set {t} networks {{ typeof {ip} daddr; flags interval; }}", "{r} {ip} daddr @networks drop",
    )),
)  # fmt: skip


FLOW_OFFLOAD = Feature(
    "flowtable", ("nf_flow_table", "nf_flow_table_inet", "nft_flow_offload"), (
        "add flowtable {t} flows {{ hook ingress priority 0; counter; }}",
        "{r} flow add @flows",
    ))
"""Needed by the option `flowtable` only."""


def check(families: Iterable[Family], features: Iterable[Feature] = FEATURES) -> str:
    """Return one transaction that creates *features* and deletes them. It never affects a packet."""
    features = tuple(features)
    text = ""
    for family in families:
        text += "".join(feature.text(family, flags="flags dormant;") for feature in features)
        text += f"delete table {family.ip} {TABLE}\n"
    return text


def lacking(kernel: Kernel, families: Sequence[Family], features: Sequence[Feature] = FEATURES) -> list[str]:
    """Return the features that *kernel* lacks. Makes no lasting change."""
    with suppress(SyncFailed):
        kernel.apply_text(check(families, features))
        return []
    problems = []
    for family in families:
        for feature in features:
            try:
                kernel.apply_text(check([family], [feature]))
            except SyncFailed as refused:
                if is_permission(refused):
                    return [f"permission denied, {PERMISSION}"]
                problems.append(f"no {feature.what} in family {family.ip} ({refused})")
    return problems


def is_permission(refused: SyncFailed) -> bool:
    """Return True if the kernel refused for lack of privileges."""
    return "Operation not permitted" in str(refused)
