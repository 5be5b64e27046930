"""Noticing what somebody else does to our chains.

With nf_tables the kernel announces every commit, so a flush is known at once. The
canaries are for the legacy interface, which announces nothing: chains without a use, so
that their absence means that everything was flushed (kube-proxy 1.36,
pkg/util/iptables/monitor.go). A flush of rules alone leaves them; it takes our jumps.
"""

import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from kproxy_core.backend.api import Damage
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.programs import OwnProcesses
from kproxy_core.model.address import FAMILY_BY_AF, Family
from kproxy_iptables import names
from kproxy_iptables.skeleton import BUILT_IN_CHAINS, JUMPS
from kproxy_xtables.rules import missing_jumps
from kproxy_xtables.tables import Tables

log = logging.getLogger("kproxy.iptables")

_FLUSH_PATIENCE = 5.0
"""Seconds to wait for the rest of a flush; writing in the middle of one would be for nothing."""
_FLUSH_POLL = 0.1

_NFNLGRP_NFTABLES = 7
_SOL_NETLINK = 270
_NETLINK_ADD_MEMBERSHIP = 1
_SO_RCVBUFFORCE = 33
_BUFFER = 8 << 20
"""Bytes of notifications that may wait. A foreign flush may be more; that is noticed then, too."""

_NFTABLES = 10 << 8
_GETGEN, _NEWGEN = 16, 15
_NEW_RULE, _DELETE_RULE, _NEW_CHAIN, _DELETE_CHAIN, _DELETE_TABLE = 6, 8, 3, 5, 2
_CHANGES = {
    _NEW_RULE: "rule added", _DELETE_RULE: "rule deleted",
    _NEW_CHAIN: "chain added", _DELETE_CHAIN: "chain deleted", _DELETE_TABLE: "table deleted",
}  # fmt: skip
_TABLES = (names.FILTER, names.NAT, names.MANGLE)
_HEADER = struct.Struct("=IHHIIBBH")
"""nlmsghdr and nfgenmsg."""


class Watcher:
    """Reports foreign changes from threads of its own until it is closed."""

    def __init__(
        self, tables: Collection[Tables], own: OwnProcesses, damaged: Damage, canary_period: float
    ) -> None:
        """Begin watching for changes by others than the *own* processes."""
        self._tables = {each.family: each for each in tables}
        self._own = own
        self._damaged = damaged
        self._canary_period = canary_period
        self._stop = os.eventfd(0)
        self._stopped = threading.Event()
        self._events: socket.socket | None = None
        self._threads = [threading.Thread(target=self._watch_canaries, name="iptables-canary", daemon=True)]
        if any(each.variant.nft for each in tables):
            try:
                self._events = _listen()
            except OSError as error:
                log.warning("commits to nf_tables can't be watched", extra={"fields": {"error": str(error)}})
            else:
                self._threads.append(
                    threading.Thread(
                        target=self._watch_commits, args=[self._events], name="iptables-watch", daemon=True
                    )
                )
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching; returns when no further report will come."""
        self._stopped.set()
        os.eventfd_write(self._stop, 1)
        for thread in self._threads:
            thread.join()
        if self._events is not None:
            self._events.close()
        os.close(self._stop)

    # Commits ------------------------------------------------------------------------------

    def _watch_commits(self, events: socket.socket) -> None:
        commits = Commits()
        waiting = select.poll()
        waiting.register(events, select.POLLIN)
        waiting.register(self._stop, select.POLLIN)
        while True:
            if any(descriptor == self._stop for descriptor, _ in waiting.poll()):
                return
            try:
                data = events.recv(netlink.RECEIVE_SIZE)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                for family in self._tables:
                    self._damaged(family, "notifications were lost")
                continue
            if _sender(data) not in self._own:
                for change in commits.read(data):
                    self._judge(change)

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
                if what := self._look(tables):
                    self._damaged(family, what)

    def _look(self, tables: Tables) -> str:
        """What somebody else has done to *tables*; "" if nothing. Waits for the end of a flush."""
        lost = _lost_canaries(tables)
        jumps: list[str] = []
        if not lost and self._events is None and (jumps := _lost_jumps(tables)):
            lost = _lost_canaries(tables)  # It may be the beginning of a flush of everything.
        until = time.monotonic() + _FLUSH_PATIENCE
        while 0 < len(lost) < len(names.CANARY_TABLES) and time.monotonic() < until:
            if self._stopped.wait(_FLUSH_POLL):
                return ""
            lost = _lost_canaries(tables)
        if lost:
            return f"flushed: {', '.join(lost)}"
        return f"no jump to our chains in {', '.join(jumps)}" if jumps else ""


def _lost_canaries(tables: Tables) -> list[str]:
    """The tables without a canary; none if that can't be told at the moment."""
    try:
        return [table for table in names.CANARY_TABLES if not tables.has_chain(table, names.CANARY)]
    except HostError as error:
        log.debug("canaries: %s", error)
        return []


def _lost_jumps(tables: Tables) -> list[str]:
    """The built-in chains that lack one of our jumps; none if that can't be told at the moment."""
    chains = dict.fromkeys((jump.table, jump.chain) for jump in JUMPS)
    try:
        return [f"{chain} of {table}" for table, chain in chains if _lacks_jump(tables, table, chain)]
    except HostError as error:
        log.debug("jumps: %s", error)
        return []


def _lacks_jump(tables: Tables, table: str, chain: str) -> bool:
    """Whether a built-in chain has not all our jumps. Raises HostError."""
    jumps = [jump for jump in JUMPS if (jump.table, jump.chain) == (table, chain)]
    return bool(missing_jumps(jumps, {(table, chain): tables.rules(table, chain)}))


def _listen() -> socket.socket:
    events = netlink.open_socket(netlink.NETLINK_NETFILTER)
    try:
        events.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        events.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES)
    except OSError:
        events.close()
        raise
    return events


def generation() -> int:
    """The number of the last commit to nf_tables; 0 if the kernel does not tell."""
    try:
        return _ask_generation()
    except OSError:
        return 0


def _ask_generation() -> int:
    request = netlink.message(_NFTABLES | _GETGEN, 0, struct.pack(">BBH", 0, 0, 0))
    with netlink.open_socket(netlink.NETLINK_NETFILTER) as connection:
        connection.send(request)
        answer = connection.recv(netlink.RECEIVE_SIZE)
    for kind, _, _, start, end in netlink.messages(answer):
        if kind == netlink.NLMSG_ERROR:
            netlink.raise_for(netlink.error_code(answer, start))
        return int.from_bytes(netlink.attributes(answer, start + 4, end).get(1, b""), "big")
    return 0


class ForeignChange(NamedTuple):
    """What one commit by somebody else did to one family."""

    family: Family
    what: str
    certain: bool
    """It changed our chains."""
    suspected: frozenset[tuple[str, str]]
    """Built-in chains that lost rules; the kernel does not say which."""


class Commits:
    """Puts notifications together into what each commit did to our chains."""

    def __init__(self) -> None:
        self._changes: dict[Family, dict[str, int]] = {}
        self._suspected: dict[Family, set[tuple[str, str]]] = {}

    def read(self, data: bytes) -> Iterator[ForeignChange]:
        """Take in one datagram; yields at the end of each commit that touched us."""
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind, _, _, _, number, _, _ = _HEADER.unpack_from(data, at)
            if size < _HEADER.size:
                return
            if kind == _NFTABLES | _NEWGEN:
                yield from self._ended(data, at + _HEADER.size, at + size)
            elif kind & ~0xFF == _NFTABLES and number in FAMILY_BY_AF and kind & 0xFF in _CHANGES:
                self._note(FAMILY_BY_AF[number], kind & 0xFF, data, at + _HEADER.size, at + size)
            at += (size + 3) & ~3

    def _note(self, family: Family, kind: int, data: bytes, start: int, end: int) -> None:
        found = netlink.attributes(data, start, end)
        table = _text(found.get(1, b""))
        if table not in _TABLES:
            return
        # NFTA_RULE_CHAIN, but NFTA_CHAIN_NAME
        chain = _text(found.get(3 if kind in (_NEW_CHAIN, _DELETE_CHAIN) else 2, b""))
        if kind == _DELETE_TABLE or names.is_ours(table, chain):
            changes = self._changes.setdefault(family, {})
            changes[_CHANGES[kind]] = changes.get(_CHANGES[kind], 0) + 1
        elif kind == _DELETE_RULE and chain in BUILT_IN_CHAINS:
            self._suspected.setdefault(family, set()).add((table, chain))

    def _ended(self, data: bytes, start: int, end: int) -> Iterator[ForeignChange]:
        if not (self._changes or self._suspected):
            return
        found = netlink.attributes(data, start, end)
        by = f" by {_text(found[3])}" if 3 in found else ""
        for family in {*self._changes, *self._suspected}:
            changes = self._changes.get(family, {})
            suspected = frozenset(self._suspected.get(family, ()))
            what = ", ".join(f"{what} ({n}x)" if n > 1 else what for what, n in changes.items())
            yield ForeignChange(family, (what or "rule deleted") + by, bool(changes), suspected)
        self._changes, self._suspected = {}, {}


def _sender(data: bytes) -> int:
    """The netlink port behind a datagram, which holds messages of one commit only.

    A program's first netlink socket has the process id for its port.
    """
    return int(_HEADER.unpack_from(data, 0)[4]) if len(data) >= _HEADER.size else 0


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")
