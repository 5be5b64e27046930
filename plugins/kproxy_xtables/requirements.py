"""Requirements of iptables rules: programs, tables, matches and targets, each tried on its own."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from kproxy_core.contract import Family, HostError, Requirement
from kproxy_core.linux import process, programs
from kproxy_core.linux.modules import Modules
from kproxy_core.linux.trial import FeatureProbe, problem_of
from kproxy_xtables.tables import Tables, Unreadable
from kproxy_xtables.variant import OLDEST, PROGRAM, NoVariant, Variant, find_variant, probe

KERNEL_OPTIONS = {
    "ip_tables": "CONFIG_IP_NF_IPTABLES", "ip6_tables": "CONFIG_IP6_NF_IPTABLES",
    "iptable_nat": "CONFIG_IP_NF_NAT", "ip6table_nat": "CONFIG_IP6_NF_NAT",
    "iptable_filter": "CONFIG_IP_NF_FILTER", "ip6table_filter": "CONFIG_IP6_NF_FILTER",
    "iptable_mangle": "CONFIG_IP_NF_MANGLE", "ip6table_mangle": "CONFIG_IP6_NF_MANGLE",
    "ipt_REJECT": "CONFIG_IP_NF_TARGET_REJECT", "ip6t_REJECT": "CONFIG_IP6_NF_TARGET_REJECT",
    "x_tables": "CONFIG_NETFILTER_XTABLES", "nft_chain_nat": "CONFIG_NFT_NAT",
    "nfnetlink": "CONFIG_NETFILTER_NETLINK", "xt_tcpudp": "CONFIG_NETFILTER_XTABLES",
    "xt_mark": "CONFIG_NETFILTER_XT_MARK", "xt_nat": "CONFIG_NETFILTER_XT_NAT",
    "xt_set": "CONFIG_NETFILTER_XT_SET",
    **{f"xt_{name}": f"CONFIG_NETFILTER_XT_TARGET_{name}" for name in ("MASQUERADE", "REDIRECT")},
    **{f"xt_{name}": f"CONFIG_NETFILTER_XT_MATCH_{name.upper()}"
       for name in ("addrtype", "comment", "conntrack", "physdev", "recent", "sctp", "statistic")},
}  # fmt: skip
"""Kernel configuration options of the modules named here."""

_CHAIN = "KPROXY-CHECK"
_NFT = ("nfnetlink", "nf_tables")
_PRIVILEGES = ("CAP_NET_ADMIN", "CAP_NET_RAW")


class Feature(NamedTuple):
    """A match or target: *spec* is a rule that uses it, *modules* the kernel modules that provide it.

    ``{p}`` stands for ip or ip6, ``{address}`` for an address of the family.
    """

    what: str
    modules: tuple[str, ...]
    spec: str
    table: str = "nat"


COMMENTS = Feature("comments", ("xt_comment",), '-m comment --comment "check" -j RETURN')
PORTS = Feature("ports of TCP and UDP", ("xt_tcpudp",), "-p tcp -m tcp --dport 80 -j RETURN")
CONNTRACK = Feature("conntrack match", ("xt_conntrack",), "-m conntrack --ctstate NEW -j RETURN")
ADDRTYPE = Feature("addrtype match", ("xt_addrtype",), "-m addrtype --dst-type LOCAL -j RETURN")
MARKS = Feature("marks", ("xt_mark",), "-m mark ! --mark 0x4000/0x4000 -j MARK --set-xmark 0x4000/0x4000")
MASQUERADE = Feature("MASQUERADE --random-fully", ("xt_MASQUERADE",), "-j MASQUERADE --random-fully")
REJECT = Feature("REJECT", ("{p}t_REJECT",), "-j REJECT", "filter")
"""Features that more than one mode needs."""

_ADDRESS = {Family.IPV4: "192.0.2.1", Family.IPV6: "[2001:db8::1]"}


def check_privileges(variant: Variant | None) -> Requirement:
    """Check the privileges to use iptables. Only the legacy variant opens a raw socket."""
    wanted = _PRIVILEGES[:1] if variant is not None and variant.nft else _PRIVILEGES
    what, held = " and ".join(wanted), process.network_privileges()
    missing = [name for name in wanted if name not in held]
    if missing:
        return Requirement(
            what, False, f"no {' and no '.join(missing)} over this network namespace",
            f"run as root or with {what}")
    return Requirement(what, True, "held")


def check_programs(modules: Modules, *, load_modules: bool) -> tuple[Requirement, Variant | None]:
    """Find the iptables of this node. Without *load_modules*, run nothing that would load nf_tables."""
    oldest = ".".join(map(str, OLDEST))
    what, remedy = f"iptables {oldest} or newer", "install iptables 1.8 or newer"
    try:
        if load_modules or not modules.not_loaded(_NFT):
            variant = find_variant()
            return Requirement(what, True, str(variant)), variant
    except NoVariant as missing:
        return Requirement(what, False, str(missing), remedy), None
    legacy = probe("-legacy")
    if legacy is not None and legacy.version >= OLDEST:
        found = f"{legacy}; iptables-nft not run because that would load nf_tables"
        return Requirement(what, True, found, guessed=True), legacy
    if not programs.find(PROGRAM[Family.IPV4]):
        return Requirement(what, False, "iptables is not installed", remedy), None
    return Requirement(what, True, "installed, not run because that would load nf_tables", guessed=True), None


def check_other_programs(variant: Variant | None, families: Iterable[Family]) -> Iterator[Requirement]:
    """Yield a requirement for each family in which other programs leave no table usable for *variant*.

    Call this in the node's network namespace, before a trial.
    """
    for family in families:
        if variant is None:
            return
        try:
            Tables(family, variant).check_foreign_rules()
        except Unreadable as error:
            yield Requirement(
                f"tables of {family.label} that other programs leave usable for iptables", False, str(error),
                "remove that table or rule, or use the nftables mode")
        except HostError:  # Told by others.
            continue


def try_rules(
    tables: Tables, attempts: FeatureProbe, features: Iterable[Feature], other_tables: Iterable[str] = ()
) -> Iterator[Requirement]:
    """Read the nat table; if that works, try rules in *other_tables* and with each of *features*."""
    reading = FeatureProbe(attempts.modules, why_not="", load_modules=attempts.load_modules)
    nat = reading.attempt(
        f"{tables.family.label}: nat table", _table_modules("nat", tables), partial(problem_of, tables.check),
        "use a kernel with netfilter NAT")  # fmt: skip
    yield nat
    if not nat.met:
        return
    for name in other_tables:
        yield attempts.attempt(
            f"{tables.family.label}: {name} table", _table_modules(name, tables),
            _adding(tables, name, "-j RETURN"))  # fmt: skip
    for feature in features:
        own = [module.format(p=tables.family.ip) for module in feature.modules]
        compatible = ("nft_compat",) if tables.variant.nft and own else ()
        rule = feature.spec.format(address=_ADDRESS[tables.family])
        yield attempts.attempt(
            f"{tables.family.label}: {feature.what}", own, _adding(tables, feature.table, rule),
            rests_on=(*_table_modules(feature.table, tables), *compatible))  # fmt: skip


def _table_modules(name: str, tables: Tables) -> tuple[str, ...]:
    if tables.variant.nft:
        return (*_NFT, "nft_chain_nat") if name == "nat" else _NFT
    ip = tables.family.ip
    return ("x_tables", f"{ip}_tables", f"{ip}table_{name}")


def _adding(tables: Tables, table: str, spec: str) -> Callable[[], str]:
    """Return an action that adds a rule to a chain made for that, and returns the problem or ""."""
    text = f"*{table}\n:{_CHAIN} - [0:0]\n-F {_CHAIN}\n-A {_CHAIN} {spec}\nCOMMIT\n"
    return partial(problem_of, partial(tables.restore, text))
