"""Notices changes of our tables by other processes. The kernel filters out our own commits."""

from collections.abc import Collection, Sequence

from kproxy_core.backend.api import Damage
from kproxy_core.host.netlink.commits import NFNLGRP, CommitReader
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, sender
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.netlink.watch import Watch
from kproxy_core.model.address import Family
from kproxy_nftables.names import TABLE

_BUFFER = 8 << 20
"""Bytes of notifications that the kernel queues. A foreign flush may exceed them and is reported as well."""


class Watcher:
    """Reports foreign changes from a thread of its own until it is closed."""

    def __init__(self, own_ports: Collection[int], damaged: Damage) -> None:
        """Start watching. *own_ports* are the netlink ports of this process; more may be added later.

        Raises OSError.
        """
        self._own_ports = own_ports
        self._damaged = damaged
        self._commits = CommitReader()
        sock = NetlinkSocket.open(
            NETLINK_NETFILTER, groups=(NFNLGRP,), ignore=own_ports, receive_space=_BUFFER
        )
        self._watch = Watch("nftables-watch", sock, self._receive)

    def close(self) -> None:
        """Stop watching; nothing is reported after this returns."""
        self._watch.close()

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        if lost:
            for family in Family:
                self._damaged(family, "notifications were lost")
        for data in datagrams:
            # libnftables may have opened another socket since the filter was installed.
            if sender(data) in self._own_ports:
                continue
            for commit in self._commits.read(data):
                for family, what in commit.summary(lambda change: change.table == TABLE).items():
                    self._damaged(family, what)
