"""Announced commits: what other processes change (linux/netfilter/nf_tables.h).

The kernel sends the changes of a commit to the group NFNLGRP_NFTABLES, and then a message with the number of
the commit and the process that made it.
"""

import enum
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Final, NamedTuple

from kproxy_core.model.address import FAMILY_BY_AF, Family
from kproxy_core.netlink import messages as netlink
from kproxy_core.netlink.messages import decoding
from kproxy_core.netlink.sockets import NetlinkSocket, NotificationThread
from kproxy_core.nft.messages import KIND, TABLE_NAME

COMMITS_GROUP = 7  # NFNLGRP_NFTABLES
_NEWGEN, _GETGEN = 15, 16
_GEN_ID, _GEN_PID, _GEN_NAME = 1, 2, 3
_RECEIVE_SPACE = 8 << 20
"""Limit in bytes for pending messages. If a foreign flush announces more, the loss is noticed instead."""


class ChangeKind(enum.StrEnum):
    TABLE_ADDED = "table added"
    TABLE_DELETED = "table deleted"
    CHAIN_ADDED = "chain added"
    CHAIN_DELETED = "chain deleted"
    RULE_ADDED = "rule added"
    RULE_DELETED = "rule deleted"
    SET_ADDED = "set added"
    SET_DELETED = "set deleted"
    ELEMENT_ADDED = "element added"
    ELEMENT_DELETED = "element deleted"
    OBJECT_ADDED = "stateful object added"
    OBJECT_DELETED = "stateful object deleted"
    FLOWTABLE_ADDED = "flowtable added"
    FLOWTABLE_DELETED = "flowtable deleted"


_KINDS: Final = {
    0: (ChangeKind.TABLE_ADDED, 0), 2: (ChangeKind.TABLE_DELETED, 0),
    3: (ChangeKind.CHAIN_ADDED, 3), 5: (ChangeKind.CHAIN_DELETED, 3),
    6: (ChangeKind.RULE_ADDED, 2), 8: (ChangeKind.RULE_DELETED, 2),
    9: (ChangeKind.SET_ADDED, 2), 11: (ChangeKind.SET_DELETED, 2),
    12: (ChangeKind.ELEMENT_ADDED, 2), 14: (ChangeKind.ELEMENT_DELETED, 2),
    18: (ChangeKind.OBJECT_ADDED, 2), 20: (ChangeKind.OBJECT_DELETED, 2),
    22: (ChangeKind.FLOWTABLE_ADDED, 2), 24: (ChangeKind.FLOWTABLE_DELETED, 2),
}  # fmt: skip
"""By kind of message: kind of change, and the attribute with the name of the chain, set or flowtable."""


class Change(NamedTuple):
    """One kind of change to the contents of one chain, set or flowtable."""

    family: Family
    kind: ChangeKind
    table: str
    name: str
    """Of the chain, set or flowtable; "" for a table."""


class Commit(NamedTuple):
    """The changes of one commit in the families IPv4 and IPv6."""

    changes: Counter[Change]
    author: str
    """Program and process id, as ``nft[123]``; "" if the kernel names none."""

    def summary(self, concerns: Callable[[Change], bool]) -> dict[Family, str]:
        """Describe the changes that *concerns* selects, by family: ``rule deleted (3x) by nft[123]``."""
        found: dict[Family, Counter[ChangeKind]] = {}
        for change, times in self.changes.items():
            if concerns(change):
                found.setdefault(change.family, Counter())[change.kind] += times
        by = f" by {self.author}" if self.author else ""
        return {
            family: ", ".join(f"{kind} ({n}x)" if n > 1 else kind for kind, n in kinds.items()) + by
            for family, kinds in found.items()
        }


class CommitWatch(NotificationThread):
    """Passes on commits of other processes, from a thread of its own, until it is closed."""

    def __init__(
        self, name: str, own: Container[int], foreign: Callable[[Commit], None], families: Iterable[Family],
        damaged: Callable[[Family, str], None], ignore: Collection[int] = (),
    ) -> None:
        """Start watching. *own*: the netlink ports of this process, to which more may be added.

        The kernel drops notifications of the ports *ignore* itself. After it has dropped others, *damaged* is
        called for each of *families*. Raises OSError.
        """
        self._own = own
        self._foreign = foreign
        self._families = families
        self._damaged = damaged
        self._changes: Counter[Change] = Counter()
        """Those of the commit whose end has not been announced."""
        sock = NetlinkSocket.open(
            netlink.NETLINK_NETFILTER, groups=(COMMITS_GROUP,), ignore=ignore,
            receive_space=_RECEIVE_SPACE)
        super().__init__(name, sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        if lost:
            self._changes.clear()
            for family in list(self._families):
                self._damaged(family, "notifications were lost")
        for data in datagrams:
            # The first netlink socket of a program has the process id as its port.
            if netlink.sender(data) not in self._own:
                self._read(data)

    def _read(self, data: bytes) -> None:
        """Take one datagram, and pass on each commit that it ends."""
        for kind, _, _, start, end in netlink.messages(data):
            if kind & 0xFF00 != KIND:
                continue
            attributes = start + netlink.NFGENMSG.size
            if kind & 0xFF == _NEWGEN:
                changes, self._changes = self._changes, Counter()
                self._foreign(Commit(changes, _author(netlink.attributes(data, attributes, end))))
            elif kind & 0xFF in _KINDS and start < end and data[start] in FAMILY_BY_AF:
                change = _change(FAMILY_BY_AF[data[start]], *_KINDS[kind & 0xFF], data, attributes, end)
                self._changes[change] += 1


def _change(family: Family, kind: ChangeKind, named: int, data: bytes, start: int, end: int) -> Change:
    table = name = ""
    for attribute, first, last in netlink.attribute_spans(data, start, end):
        if attribute == TABLE_NAME:
            table = netlink.text(data[first:last])
        elif attribute == named:
            name = netlink.text(data[first:last])
            break
    return Change(family, kind, table, name)


def generation(sock: NetlinkSocket) -> int:
    """Return the number of the last commit in this network namespace. Raises OSError."""
    data, start, end = sock.request_one(KIND | _GETGEN, netlink.NFGENMSG.pack(0, 0, 0))
    with decoding("the number of the last commit"):
        return int.from_bytes(netlink.attributes(data, start + netlink.NFGENMSG.size, end)[_GEN_ID], "big")


def _author(attributes: dict[int, bytes]) -> str:
    name = netlink.text(attributes.get(_GEN_NAME, b""))
    return f"{name}[{int.from_bytes(attributes.get(_GEN_PID, b''), 'big')}]" if name else ""
