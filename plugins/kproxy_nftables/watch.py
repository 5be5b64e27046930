"""Notices changes of our tables by other processes at once.

Our own commits are filtered out in the kernel, so they do not wake an idle proxy.
"""

from collections.abc import Collection

from kproxy_core.contract import Damage
from kproxy_core.linux.nftables import Commit, CommitWatch
from kproxy_core.model.address import Family
from kproxy_nftables.names import TABLE


def watch(own_ports: Collection[int], damaged: Damage) -> CommitWatch:
    """Report foreign changes. *own_ports*: see `CommitWatch`. Raises OSError."""

    def judge(commit: Commit) -> None:
        for family, what in commit.summary(lambda change: change.table == TABLE).items():
            damaged(family, what)

    return CommitWatch("nftables-watch", own_ports, judge, Family, damaged, ignore=own_ports)
