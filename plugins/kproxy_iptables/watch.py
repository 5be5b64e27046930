"""Detection of foreign changes to our chains.

nf_tables announces every commit, so that a flush is noticed at once. The legacy interface announces nothing:
there the canaries, chains without a purpose, show by their absence that everything was flushed (kube-proxy
1.36, pkg/util/iptables/monitor.go). A flush of rules only leaves the canaries, but deletes our jumps.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from kproxy_core.backend.api import Damage
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.messages import (
    NETLINK_NETFILTER,
    NFGENMSG,
    attributes,
    messages,
    sender,
    text,
)
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.netlink.watch import Watch
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import FAMILY_BY_AF, Family
from kproxy_iptables import names
from kproxy_iptables.skeleton import BUILT_IN_CHAINS, JUMPS
from kproxy_xtables.rules import ChainKey, missing_jumps
from kproxy_xtables.tables import Tables

log = logging.getLogger("kproxy.iptables")

_FLUSH_TIMEOUT = 5.0
"""Seconds to wait for the rest of a flush, which would delete what is written during it."""
_FLUSH_POLL = 0.1

_NFNLGRP_NFTABLES = 7
_RECEIVE_SPACE = 8 << 20
"""Bytes of notifications that may wait. If a foreign flush is larger, the loss is noticed instead."""

_NFTABLES = 10 << 8
_GETGEN, _NEWGEN = 16, 15
_NEW_RULE, _DELETE_RULE, _NEW_CHAIN, _DELETE_CHAIN, _DELETE_TABLE = 6, 8, 3, 5, 2
_CHANGES = {
    _NEW_RULE: "rule added", _DELETE_RULE: "rule deleted",
    _NEW_CHAIN: "chain added", _DELETE_CHAIN: "chain deleted", _DELETE_TABLE: "table deleted",
}  # fmt: skip
_TABLES = (names.FILTER, names.NAT, names.MANGLE)


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
        self._commits = Commits()
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

    def _watch_commits(self) -> Watch | None:
        try:
            events = NetlinkSocket.open(
                NETLINK_NETFILTER, groups=[_NFNLGRP_NFTABLES], receive_space=_RECEIVE_SPACE
            )
        except OSError as error:
            log.warning("cannot watch nf_tables commits", extra={"fields": {"error": str(error)}})
            return None
        return Watch("iptables-watch", events, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        for data in datagrams:
            # The first netlink socket of a program has the process id as its port.
            if sender(data) not in self._own:
                for change in self._commits.read(data):
                    self._judge(change)
        if lost:
            self._commits = Commits()
            for family in self._tables:
                self._damaged(family, "notifications were lost")

    def _judge(self, change: "ForeignChange") -> None:
        tables = self._tables.get(change.family)
        if tables is None:
            return
        try:
            damaged = change.certain or any(_lacks_jump(tables, *chain) for chain in change.suspected)
        except HostError:
            damaged = True
        if damaged:
            self._damaged(change.family, change.what)

    # Canaries -----------------------------------------------------------------------------

    def _watch_canaries(self) -> None:
        while not self._stopped.wait(self._canary_period):
            for family, tables in self._tables.items():
                if what := self._check(tables):
                    self._damaged(family, what)

    def _check(self, tables: Tables) -> str:
        """Wait for the end of a flush and return a description of the damage to *tables*; "" if none."""
        lost = _lost_canaries(tables)
        jumps: list[str] = []
        if not lost and self._watch is None and (jumps := _lost_jumps(tables)):
            lost = _lost_canaries(tables)  # A complete flush may just have begun.
        until = time.monotonic() + _FLUSH_TIMEOUT
        while 0 < len(lost) < len(names.CANARY_TABLES) and time.monotonic() < until:
            if self._stopped.wait(_FLUSH_POLL):
                return ""
            lost = _lost_canaries(tables)
        if lost:
            return f"flushed: {', '.join(lost)}"
        return f"no jump to our chains in {', '.join(jumps)}" if jumps else ""


def _lost_canaries(tables: Tables) -> list[str]:
    """Return the tables without a canary; none if they can't be read now."""
    try:
        return [table for table in names.CANARY_TABLES if not tables.has_chain(table, names.CANARY)]
    except HostError as error:
        log.debug("canaries not checked", extra={"fields": {"error": str(error)}})
        return []


def _lost_jumps(tables: Tables) -> list[str]:
    """Return the built-in chains that lack one of our jumps; none if they can't be read now."""
    chains = dict.fromkeys((jump.table, jump.chain) for jump in JUMPS)
    try:
        return [f"{chain} of {table}" for table, chain in chains if _lacks_jump(tables, table, chain)]
    except HostError as error:
        log.debug("jumps not checked", extra={"fields": {"error": str(error)}})
        return []


def _lacks_jump(tables: Tables, table: str, chain: str) -> bool:
    """Return whether a built-in chain lacks one of our jumps. Raises HostError."""
    jumps = [jump for jump in JUMPS if (jump.table, jump.chain) == (table, chain)]
    return bool(missing_jumps(jumps, {(table, chain): tables.rules(table, chain)}))


def read_generation() -> int:
    """Return the number of the last commit to nf_tables; 0 if it can't be read."""
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            answers = sock.request(_NFTABLES | _GETGEN, 0, NFGENMSG.pack(0, 0, 0))
    except OSError:
        return 0
    for data, start, end in answers:
        return int.from_bytes(attributes(data, start + NFGENMSG.size, end).get(1, b""), "big")
    return 0


class ForeignChange(NamedTuple):
    """The changes that one foreign commit made in one family."""

    family: Family
    what: str
    certain: bool
    """It changed our chains."""
    suspected: frozenset[ChainKey]
    """Built-in chains that lost rules; the notification does not say which rules."""


class Commits:
    """Collects notifications until the end of each commit."""

    def __init__(self) -> None:
        self._changes: dict[Family, dict[str, int]] = {}
        self._suspected: dict[Family, set[ChainKey]] = {}

    def read(self, data: bytes) -> Iterator[ForeignChange]:
        """Take one datagram. Yield the changes of each commit that ends in it and concerns our chains."""
        for kind, _, _, start, end in messages(data):
            if kind == _NFTABLES | _NEWGEN:
                yield from self._ended(data, start + NFGENMSG.size, end)
            elif kind & ~0xFF == _NFTABLES and kind & 0xFF in _CHANGES and data[start] in FAMILY_BY_AF:
                self._note(FAMILY_BY_AF[data[start]], kind & 0xFF, data, start + NFGENMSG.size, end)

    def _note(self, family: Family, kind: int, data: bytes, start: int, end: int) -> None:
        found = attributes(data, start, end)
        table = text(found.get(1, b""))
        if table not in _TABLES:
            return
        # NFTA_CHAIN_NAME or NFTA_RULE_CHAIN
        chain = text(found.get(3 if kind in (_NEW_CHAIN, _DELETE_CHAIN) else 2, b""))
        if kind == _DELETE_TABLE or names.is_ours(table, chain):
            changes = self._changes.setdefault(family, {})
            changes[_CHANGES[kind]] = changes.get(_CHANGES[kind], 0) + 1
        elif kind == _DELETE_RULE and chain in BUILT_IN_CHAINS:
            self._suspected.setdefault(family, set()).add((table, chain))

    def _ended(self, data: bytes, start: int, end: int) -> Iterator[ForeignChange]:
        if not (self._changes or self._suspected):
            return
        found = attributes(data, start, end)
        by = f" by {text(found[3])}" if 3 in found else ""
        for family in {*self._changes, *self._suspected}:
            changes = self._changes.get(family, {})
            suspected = frozenset(self._suspected.get(family, ()))
            what = ", ".join(f"{what} ({n}x)" if n > 1 else what for what, n in changes.items())
            yield ForeignChange(family, (what or "rule deleted") + by, bool(changes), suspected)
        self._changes, self._suspected = {}, {}
