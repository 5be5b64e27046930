"""The iptables rules of one IP family: reading them, and writing what differs."""

from collections.abc import Iterable

from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS
from kproxy_xtables.rules import ChainKey, Jump, RulesByChain, missing_jumps
from kproxy_xtables.tables import Tables

TABLES = (MANGLE, FILTER, NAT)
"""In the order in which they are written. What nat sends to IPVS is let in by then."""


def read(tables: Tables) -> dict[ChainKey, list[str]]:
    """All chains with their rules, of the tables that we use. Raises HostError."""
    return {(saved.table, saved.name): saved.rules for saved in tables.save() if saved.table in TABLES}


def difference(held: RulesByChain, want: RulesByChain, jumps: Iterable[Jump] = JUMPS) -> str:
    """The input of iptables-restore that makes our chains and *jumps* right; "" if they are.

    A chain that differs is written anew.
    """
    parts: list[str] = []
    for table in TABLES:
        chains = [key for key in want if key[0] == table and held.get(key) != want[key]]
        lines = [f"-A {key[1]} {rule}\n" for key in chains for rule in want[key]]
        lines += [f"{jump.command}\n" for jump in missing_jumps(jumps, held) if jump.table == table]
        if chains or lines:
            declared = "".join(f":{chain} - [0:0]\n" for _, chain in chains)
            parts.append(f"*{table}\n{declared}{''.join(lines)}COMMIT\n")
    return "".join(parts)
