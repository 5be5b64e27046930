"""Portals in the kernel: through iptables, or nft where there is no iptables."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Protocol

from kproxy_core.backend.errors import SyncFailed, Unsupported
from kproxy_core.model.address import Family
from kproxy_userspace import batch
from kproxy_userspace.batch import JUMPS, NFT_FAMILY, PORTAL_CHAINS, Jump, Redirect
from kproxy_userspace.names import NODE_PORT_HOST, NON_LOCAL, PORTALS_HOST, TABLE

IPTABLES = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
LOCK_PATIENCE = "5"
"""Seconds that iptables waits for its lock."""
LONGEST_RUN = 120

_HOST_RULES = tuple(f"-A {chain} " for chain in (PORTALS_HOST, NODE_PORT_HOST))
"""Every portal has one of these."""
_NFT_RULES = 3
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Portals(Protocol):
    """The redirections of one family."""

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        """Hold exactly these. Raises SyncFailed."""

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        """Take some out and put others in. Raises SyncFailed."""

    def intact(self, count: int) -> bool:
        """Whether what leads to *count* redirections seems to be there. Raises SyncFailed."""

    def text(self, redirects: Sequence[Redirect]) -> str:
        """The complete rules."""

    def remove(self, *, dry_run: bool) -> list[str]:
        """Remove every trace; says what there was. Raises SyncFailed."""


def run(*argv: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program to its end. Raises SyncFailed if it can't be started or hangs."""
    try:
        return subprocess.run(
            [find_program(argv[0]) or argv[0], *argv[1:]], input=stdin, capture_output=True, text=True,
            errors="replace", timeout=LONGEST_RUN, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SyncFailed(f"{argv[0]}: {error}") from error


def find_program(name: str) -> str | None:
    """The path of a program, also where PATH leaves out what only root needs."""
    return shutil.which(name, path=_PATH)


def _checked(*argv: str, stdin: str = "") -> str:
    done = run(*argv, stdin=stdin)
    if done.returncode:
        raise SyncFailed(f"{argv[0]}: exit {done.returncode}: {' '.join(done.stderr.split())[:500]}")
    return done.stdout


class IptablesPortals:
    """kube-proxy's chains, written by iptables-restore."""

    def __init__(self, family: Family) -> None:
        self._program = IPTABLES[family]

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        self._restore(batch.iptables_rewrite(redirects, self._missing_jumps()))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        self._restore(batch.iptables_change(deletes, adds))

    def intact(self, count: int) -> bool:
        if self._missing_jumps():
            return False
        lines = self._list("nat").splitlines()
        return sum(line.startswith(_HOST_RULES) for line in lines) >= count

    def text(self, redirects: Sequence[Redirect]) -> str:
        return batch.iptables_rewrite(redirects, JUMPS)

    def remove(self, *, dry_run: bool) -> list[str]:
        removed: list[str] = []
        for table, chains in (("nat", PORTAL_CHAINS), ("filter", (NON_LOCAL,))):
            if not self._has_chain(table, chains[0]):
                continue  # they come and go together; other modes' rules may be many
            listed = self._list(table).splitlines()
            present = [chain for chain in chains if f"-N {chain}" in listed]
            if not present:
                continue
            removed += [f"{self._program}: chain {chain} of table {table}" for chain in present]
            if dry_run:
                continue
            jumps = [line for line in listed if line.startswith("-A ") and line.rpartition(" ")[2] in present]
            lines = [f"-D{line[2:]}" for line in jumps]
            lines = [f"*{table}", *(f":{chain} - [0:0]" for chain in present), *lines,
                     *(f"-X {chain}" for chain in present), "COMMIT", ""]
            self._restore("\n".join(lines))
        return removed

    def _missing_jumps(self) -> list[Jump]:
        listed = {table: self._list(table).splitlines() for table in ("nat", "filter")}
        return [
            jump for jump in JUMPS
            if not any(
                line.startswith(f"-A {jump.chain} ") and line.endswith(f"-j {jump.target}")
                for line in listed[jump.table]
            )
        ]

    def _has_chain(self, table: str, chain: str) -> bool:
        return run(self._program, "-w", LOCK_PATIENCE, "-t", table, "-S", chain).returncode == 0

    def _list(self, table: str) -> str:
        return _checked(self._program, "-w", LOCK_PATIENCE, "-t", table, "-S")

    def _restore(self, text: str) -> None:
        _checked(f"{self._program}-restore", "-w", LOCK_PATIENCE, "--noflush", stdin=text)


class NftPortals:
    """A small table of our own."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._table = (NFT_FAMILY[family], TABLE)

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        _checked("nft", "-f", "-", stdin=batch.nft_rewrite(self._family, redirects))

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        _checked("nft", "-f", "-", stdin=batch.nft_change(self._family, deletes, adds))

    def intact(self, count: int) -> bool:
        done = run("nft", "list", "table", *self._table)
        return done.stdout.count("redirect to") == _NFT_RULES and done.stdout.count(" : ") >= count

    def text(self, redirects: Sequence[Redirect]) -> str:
        return batch.nft_rewrite(self._family, redirects)

    def remove(self, *, dry_run: bool) -> list[str]:
        # Listing tables would read every rule of all of them.
        check = ["--check"] if dry_run else []
        done = run("nft", *check, "delete", "table", *self._table)
        if "No such file or directory" in done.stderr:
            return []
        if done.returncode:
            raise SyncFailed(f"nft: {' '.join(done.stderr.split())[:500]}")
        return [f"table {' '.join(self._table)}"]


class NoPortals:
    """The relays are where clients look for them; nothing is redirected."""

    def rewrite(self, redirects: Sequence[Redirect]) -> None:
        """There are none."""

    def change(self, deletes: Sequence[Redirect], adds: Sequence[Redirect]) -> None:
        """There are none."""

    def intact(self, count: int) -> bool:
        return True

    def text(self, redirects: Sequence[Redirect]) -> str:
        return ""

    def remove(self, *, dry_run: bool) -> list[str]:
        return []


def has_iptables() -> bool:
    """Whether the programs are installed; whether they work is another question."""
    return all(find_program(f"{program}{end}") for program in IPTABLES.values() for end in ("", "-restore"))


def open_portals(family: Family) -> Portals:
    """How this machine redirects. Raises Unsupported if it can't."""
    if has_iptables() and run(IPTABLES[family], "-w", LOCK_PATIENCE, "-t", "nat", "-S").returncode == 0:
        return IptablesPortals(family)
    if find_program("nft"):
        return NftPortals(family)
    raise Unsupported("neither iptables nor nft is installed; userspace.listen needs none of them")
