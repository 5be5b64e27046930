"""The iptables rules as input of iptables-restore."""

from collections.abc import Iterable

from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS
from kproxy_xtables.rules import Jump, RulesByChain, append_commands, missing_jumps

TABLES = (MANGLE, FILTER, NAT)
"""In writing order: mangle and filter must admit packets before nat leads them to IPVS."""


def difference(held: RulesByChain, want: RulesByChain, jumps: Iterable[Jump] = JUMPS) -> str:
    """Return the iptables-restore input that corrects our chains and *jumps*; "" if they are correct.

    A chain that differs is replaced as a whole.
    """
    parts: list[str] = []
    for table in TABLES:
        chains = [key for key in want if key[0] == table and held.get(key) != want[key]]
        lines = [f":{chain} - [0:0]\n" for _, chain in chains]
        lines += [append_commands(key[1], want[key]) for key in chains]
        lines += [f"{jump.command}\n" for jump in missing_jumps(jumps, held) if jump.table == table]
        if lines:
            parts.append(f"*{table}\n{''.join(lines)}COMMIT\n")
    return "".join(parts)
