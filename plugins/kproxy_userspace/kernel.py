"""Portals in the kernel: through iptables, or nft where there is no iptables."""

from collections.abc import Sequence
from typing import Protocol

from kproxy_core.backend.errors import Unsupported
from kproxy_core.host import programs
from kproxy_core.host.iptables import SavedChain, Tables
from kproxy_core.host.iptables_variant import NoVariant, find_variant
from kproxy_core.host.programs import ProgramFailed
from kproxy_core.model.address import Family
from kproxy_userspace import batch
from kproxy_userspace.batch import JUMPS, NFT_FAMILY, PORTAL_CHAINS, Jump, Redirect
from kproxy_userspace.names import NODE_PORT_HOST, NON_LOCAL, PORTALS_HOST, TABLE

_HOSTS = (PORTALS_HOST, NODE_PORT_HOST)
"""Every portal has a rule in one of these."""
_NFT_RULES = 3


class Portals(Protocol):
    """The redirections of one family."""

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        """Hold exactly these. Raises HostError."""

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        """Take some out and put others in. Raises HostError."""

    def intact(self, count: int) -> bool:
        """Whether what leads to *count* redirections seems to be there. Raises HostError."""

    def remove(self, *, dry_run: bool) -> list[str]:
        """Remove every trace; says what there was. Raises HostError."""


class IptablesPortals:
    """kube-proxy's chains, written by iptables-restore."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        self._tables.restore(batch.iptables_rewrite(redirects, self._missing_jumps()))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        self._tables.restore(batch.iptables_change(deletes, adds))

    def intact(self, count: int) -> bool:
        if self._missing_jumps():
            return False
        return sum(len(saved.lines) for saved in self._tables.save("nat") if saved.name in _HOSTS) >= count

    def remove(self, *, dry_run: bool) -> list[str]:
        if self._tables.variant.nft and not self._tables.has_chain("nat", PORTAL_CHAINS[0]):
            return []  # all of them come and go together; other modes' rules may be many
        removed: list[str] = []
        text = ""
        found: dict[str, list[SavedChain]] = {}
        for saved in self._tables.save():
            found.setdefault(saved.table, []).append(saved)
        for table, chains in (("nat", PORTAL_CHAINS), ("filter", (NON_LOCAL,))):
            held = found.get(table, [])
            present = [saved.name for saved in held if saved.name in chains]
            if present:
                removed += [f"{self._tables.program}: chain {chain} of table {table}" for chain in present]
                jumps = [line for saved in held for line in saved.lines if line.split()[-1] in present]
                text += _removal(table, present, jumps)
        if text and not dry_run:
            self._tables.restore(text)
        return removed

    def _missing_jumps(self) -> list[Jump]:
        held = {
            (saved.table, saved.name): {rule.rpartition(" ")[2] for rule in saved.rules}
            for table in ("nat", "filter") for saved in self._tables.save(table)
        }  # fmt: skip
        return [jump for jump in JUMPS if jump.target not in held.get((jump.table, jump.chain), ())]


def _removal(table: str, chains: Sequence[str], jumps: Sequence[str]) -> str:
    """The input of iptables-restore that deletes *chains* and the rules that lead there."""
    lines = [f"*{table}", *(f":{chain} - [0:0]" for chain in chains)]
    lines += [f"-D{line[2:-1]}" for line in jumps]
    lines += [*(f"-X {chain}" for chain in chains), "COMMIT", ""]
    return "\n".join(lines)


class NftPortals:
    """A small table of our own."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._table = (NFT_FAMILY[family], TABLE)

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        programs.output("nft", "-f", "-", stdin=batch.nft_rewrite(self._family, redirects))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        programs.output("nft", "-f", "-", stdin=batch.nft_change(self._family, deletes, adds))

    def intact(self, count: int) -> bool:
        done = programs.run("nft", "list", "table", *self._table)
        return done.stdout.count("redirect to") == _NFT_RULES and done.stdout.count(" : ") >= count

    def remove(self, *, dry_run: bool) -> list[str]:
        # Listing tables would read every rule of all of them.
        check = ["--check"] if dry_run else []
        done = programs.run("nft", *check, "delete", "table", *self._table)
        if "No such file or directory" in done.stderr:
            return []
        if done.returncode:
            raise ProgramFailed(programs.failure(done))
        return [f"table {' '.join(self._table)}"]


class NoPortals:
    """The relays are where clients look for them; nothing is redirected."""

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        """There are none."""

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        """There are none."""

    def intact(self, count: int) -> bool:
        return True

    def remove(self, *, dry_run: bool) -> list[str]:
        return []


def find_tables(family: Family) -> Tables | None:
    """The tables of the iptables that this node uses, if one is installed: whether they work is not asked."""
    try:
        return Tables(family, find_variant())
    except NoVariant:
        return None


def open_portals(family: Family) -> Portals:
    """How this machine redirects. Raises Unsupported if it can't."""
    tables = find_tables(family)
    if tables is not None and not tables.problem():
        return IptablesPortals(tables)
    if programs.find("nft"):
        return NftPortals(family)
    raise Unsupported("neither iptables nor nft is installed; userspace.listen needs none of them")
