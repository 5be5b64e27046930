"""The iptables rules as input of iptables-restore."""

from collections.abc import Iterable

from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS
from kproxy_xtables.rules import Jump, RulesByChain, missing_jumps

TABLES = (MANGLE, FILTER, NAT)
"""In writing order: mangle and filter must admit packets before nat leads them to IPVS."""


def difference(held: RulesByChain, want: RulesByChain, jumps: Iterable[Jump] = JUMPS) -> str:
    """Return the iptables-restore input that corrects our chains and *jumps*; "" if they are correct.

    A chain that differs is replaced as a whole.
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
