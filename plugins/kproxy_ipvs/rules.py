"""The iptables rules of one IP family: reading them, and writing what differs."""

from collections.abc import Iterable, Mapping

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.model.address import Family
from kproxy_ipvs import programs
from kproxy_ipvs.names import FILTER, MANGLE, NAT
from kproxy_ipvs.skeleton import JUMPS, ChainKey

TABLES = (MANGLE, NAT, FILTER)
_PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
_KUBELET_CHAINS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""What kubelet creates in mangle, with the iptables that the node uses (KEP-3178)."""
_LOCK_PATIENCE = "5"
"""Seconds to wait for the xtables lock."""

Chains = Mapping[ChainKey, list[str]]


class Tables:
    """The tables of one family as one set of iptables programs has them."""

    def __init__(self, family: Family, infix: str = "") -> None:
        """*infix*: ``-nft``, ``-legacy``, or "" for what plain iptables is."""
        self.family = family
        self.program = f"{_PROGRAM[family]}{infix}"

    def read(self) -> dict[ChainKey, list[str]]:
        """All chains with their rules, of the tables that we use. Raises SyncFailed."""
        chains: dict[ChainKey, list[str]] = {}
        table = ""
        for line in programs.succeed(f"{self.program}-save").splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif line.startswith(":") and table in TABLES:
                chains[table, line[1:].partition(" ")[0]] = []
            elif line.startswith("-A ") and table in TABLES:
                chain, _, spec = line[3:].partition(" ")
                chains[table, chain].append(spec)
        return chains

    def has_chain(self, table: str, chain: str) -> bool:
        """Whether *chain* exists, without reading any other. Not for legacy: asking makes the table."""
        return programs.run(self.program, "-w", _LOCK_PATIENCE, "-t", table, "-S", chain).returncode == 0

    def write(self, text: str) -> None:
        """Give *text* to iptables-restore: each table changes as a whole or not at all. Raises SyncFailed."""
        if text:
            programs.succeed(f"{self.program}-restore", "-w", _LOCK_PATIENCE, "--noflush", stdin=text)


def difference(held: Chains, want: Chains) -> str:
    """The input of iptables-restore that makes our chains and jumps right; "" if they are.

    A chain that differs is written anew.
    """
    parts: list[str] = []
    for table in TABLES:
        chains = [key for key in want if key[0] == table and held.get(key) != want[key]]
        lines = [f"-A {key[1]} {rule}\n" for key in chains for rule in want[key]]
        lines += [
            f"-I {jump.chain} {jump.spec}\n"
            for jump in JUMPS
            if jump.table == table and jump.spec not in held.get((table, jump.chain), ())
        ]
        if chains or lines:
            declared = "".join(f":{chain} - [0:0]\n" for _, chain in chains)
            parts.append(f"*{table}\n{declared}{''.join(lines)}COMMIT\n")
    return "".join(parts)


def removal(jumps: Mapping[ChainKey, Iterable[str]], chains: Iterable[ChainKey]) -> str:
    """The input of iptables-restore that deletes rules of built-in chains, and our chains."""
    chains = list(chains)
    parts: list[str] = []
    for table in TABLES:
        gone = [chain for of, chain in chains if of == table]
        lines = [f"-D {c} {rule}\n" for (of, c), rules in jumps.items() if of == table for rule in rules]
        lines += [f"-X {chain}\n" for chain in gone]
        if lines:
            # Declaring a chain empties it, so that none leads to another when they are deleted.
            declared = "".join(f":{chain} - [0:0]\n" for chain in gone)
            parts.append(f"*{table}\n{declared}{''.join(lines)}COMMIT\n")
    return "".join(parts)


def find_infix() -> str:
    """Which iptables this node uses: that in which kubelet has left its mark, else the default one."""
    for infix in ("-nft", "-legacy"):
        for chain in _KUBELET_CHAINS:
            try:
                if not programs.run(f"iptables{infix}", "-w", "1", "-t", MANGLE, "-S", chain).returncode:
                    return infix
            except SyncFailed:
                break
    return ""
