"""All kernel objects that any mode may create, as a value."""

from functools import cache, partial

from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import Variant, find_variants
from tests.core.namespaces import Namespace, namespace


@cache
def working() -> list[Variant]:
    """Return the variants of iptables that this kernel supports."""
    with namespace() as trial:
        return [variant for variant in find_variants() if trial.inside(partial(_works, variant))]


def _works(variant: Variant) -> bool:
    try:
        Tables(Family.IPV4, variant).restore("*nat\n:TRIAL - [0:0]\nCOMMIT\n")
    except HostError:
        return False
    return True


def held(node: Namespace) -> list[str]:
    """Return rules, chains, tables of nf_tables, ipsets, interfaces and virtual servers; sorted.

    Built-in chains are left out.
    """
    found = [f"ipset {name}" for name in node.run("ipset", "list", "-name").split()]
    found += [f"link {line.split()[1]}" for line in node.run("ip", "-o", "link").splitlines()]
    servers = node.run("sh", "-c", "cat /proc/net/ip_vs 2>/dev/null || true").splitlines()[3:]
    found += [" ".join(line.split()[:3]) for line in servers]
    variants = working()
    if any(variant.nft for variant in variants):
        tables = node.run("nft", "list", "tables").splitlines()
        found += [table for table in tables if table.split()[2] not in ("filter", "nat", "mangle")]
    for variant in variants:
        for family in Family:
            table = ""
            for line in node.run(variant.program(family, "save")).splitlines():
                if line.startswith("*"):
                    table = line[1:]
                elif line.startswith("-A") or (line.startswith(":") and " - " in line):
                    found.append(f"{variant.program(family)} {table} {line.partition(' [')[0]}")
    return sorted(found)
