"""Detection of foreign changes to our chains.

nf_tables announces every commit, so that a flush is noticed at once. The legacy interface announces nothing:
there the absence of the canaries, chains without a purpose, shows that everything was flushed (kube-proxy
1.36, pkg/util/iptables/monitor.go). A flush of rules keeps the canaries, but deletes our jumps.
"""

import logging
import threading
import time
from collections.abc import Collection

from kproxy_core.contract import Damage, Family, HostError
from kproxy_core.linux.programs import OwnProcesses
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.watch import Change, ChangeKind, Commit, CommitWatch, generation
from kproxy_iptables import names
from kproxy_iptables.skeleton import ALL_JUMPS
from kproxy_xtables.rules import BUILT_IN_CHAINS, has_rule, jumps_by_chain
from kproxy_xtables.tables import Tables

log = logging.getLogger("kproxy.iptables")

_FLUSH_TIMEOUT = 5.0
"""Timeout in seconds for the end of a flush, which would delete rules written during it."""
_FLUSH_POLL = 0.1

_OUR_KINDS = frozenset({
    ChangeKind.RULE_ADDED, ChangeKind.RULE_DELETED, ChangeKind.CHAIN_ADDED, ChangeKind.CHAIN_DELETED,
    ChangeKind.TABLE_ADDED, ChangeKind.TABLE_DELETED,
})  # fmt: skip
_TABLE_KINDS = (ChangeKind.TABLE_ADDED, ChangeKind.TABLE_DELETED)
"""The first is announced for a table that exists when its flags change, such as `dormant`."""
_JUMPS = jumps_by_chain(ALL_JUMPS)


class Watcher:
    """Reports foreign changes from threads of its own until it is closed."""

    def __init__(
        self, tables: Collection[Tables], own: OwnProcesses, damaged: Damage, canary_period: float
    ) -> None:
        """Start watching for changes by processes other than *own*."""
        self._tables = {each.family: each for each in tables}
        self._own = own
        self._damaged = damaged
        self._canary_period = canary_period
        self._watch = self._watch_commits() if any(each.variant.nft for each in tables) else None
        self._stopped = threading.Event()
        self._canaries = threading.Thread(target=self._watch_canaries, name="iptables-canary", daemon=True)
        self._canaries.start()

    def close(self) -> None:
        """Stop watching. No report follows."""
        self._stopped.set()
        self._canaries.join()
        if self._watch is not None:
            self._watch.close()

    # Commits ------------------------------------------------------------------------------

    def _watch_commits(self) -> CommitWatch | None:
        try:
            return CommitWatch("iptables-watch", self._own, self._judge, self._tables, self._damaged)
        except OSError as error:
            log.warning("cannot watch nf_tables commits", extra={"fields": {"error": str(error)}})
            return None

    def _judge(self, commit: Commit) -> None:
        damage = commit.summary(_concerns_ours)
        suspected = commit.summary(_may_delete_jump)
        for family, what in {**suspected, **damage}.items():
            if family in self._tables and (family in damage or self._lacks_jump(family, commit)):
                self._damaged(family, what)

    def _lacks_jump(self, family: Family, commit: Commit) -> bool:
        """Return whether a jump to our chains may be among the deleted rules, which have no contents."""
        chains = {(change.table, change.name) for change in commit.changes
                  if change.family is family and _may_delete_jump(change)}  # fmt: skip
        try:
            return any(_lacks_jump(self._tables[family], *chain) for chain in chains)
        except HostError:
            return True

    # Canaries -----------------------------------------------------------------------------

    def _watch_canaries(self) -> None:
        while not self._stopped.wait(self._canary_period):
            for family, tables in self._tables.items():
                try:
                    what = self._check(tables)
                except HostError as error:
                    log.debug("canaries not checked", extra={"fields": {"error": str(error)}})
                    continue
                if what:
                    self._damaged(family, what)

    def _check(self, tables: Tables) -> str:
        """Wait for the end of a flush and return a description of the damage to *tables*; "" if none.

        Raises HostError if they can't be read now.
        """
        lost = _lost_canaries(tables)
        jumps: list[str] = []
        if not lost and self._watch is None and (jumps := _lost_jumps(tables)):
            lost = _lost_canaries(tables)  # A complete flush may have just begun.
        until = time.monotonic() + _FLUSH_TIMEOUT
        while 0 < len(lost) < len(names.TABLES) and time.monotonic() < until:
            if self._stopped.wait(_FLUSH_POLL):
                return ""
            lost = _lost_canaries(tables)
        if lost:
            return f"flushed: {', '.join(lost)}"
        return f"no jump to our chains in {', '.join(jumps)}" if jumps else ""


def _lost_canaries(tables: Tables) -> list[str]:
    return [table for table in names.TABLES if not tables.has_chain(table, names.CANARY)]


def _lost_jumps(tables: Tables) -> list[str]:
    return [f"{chain} of {table}" for table, chain in _JUMPS if _lacks_jump(tables, table, chain)]


def _lacks_jump(tables: Tables, table: str, chain: str) -> bool:
    held = tables.rules(table, chain)
    return not all(has_rule(held, spec) for spec in _JUMPS.get((table, chain), ()))


def _concerns_ours(change: Change) -> bool:
    if change.table not in names.TABLES or change.kind not in _OUR_KINDS:
        return False
    if (change.table, change.name) == (names.FILTER, names.KUBELET_FIREWALL):
        # Kubelet adds rules of its own, but no program may delete those that guard services on loopback.
        return change.kind in (ChangeKind.RULE_DELETED, ChangeKind.CHAIN_DELETED)
    return change.kind in _TABLE_KINDS or names.is_ours(change.table, change.name)


def _may_delete_jump(change: Change) -> bool:
    built_in = change.table in names.TABLES and change.name in BUILT_IN_CHAINS
    return built_in and change.kind is ChangeKind.RULE_DELETED


def read_generation() -> int:
    """Return the number of the last commit to nf_tables; 0 if it can't be read."""
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return generation(sock)
    except OSError:
        return 0
