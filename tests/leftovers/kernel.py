"""All kernel objects that any mode may create, as a value."""

import socket
from functools import cache, partial
from pathlib import Path

from kproxy_core.linux import programs
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import Variant, find_variants
from tests.core.namespaces import Namespace, namespace

_SERVERS = Path("/proc/thread-self/net/ip_vs")


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
    with node.joined():  # and not `node.run`, which starts two programs for each
        found = [f"ipset {name}" for name in programs.output("ipset", "list", "-name").split()]
        found += [f"link {name}" for _, name in socket.if_nameindex()]
        servers = _SERVERS.read_text().splitlines()[3:] if _SERVERS.exists() else []
        found += [" ".join(line.split()[:3]) for line in servers]
        if any(variant.nft for variant in working()):
            tables = programs.output("nft", "list", "tables").splitlines()
            found += [table for table in tables if table.split()[2] not in ("filter", "nat", "mangle")]
        for variant in working():
            for family in Family:
                table = ""
                for line in variant.saved(family):
                    if line.startswith("*"):
                        table = line[1:].strip()
                    elif line.startswith("-A") or (line.startswith(":") and " - " in line):
                        found.append(
                            f"{variant.program(family)} {table} {line.partition(' [')[0].rstrip()}")
    return sorted(found)
