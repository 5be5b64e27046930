"""Detection of foreign changes to our tables."""

from collections.abc import Collection

from kproxy_core.contract import Damage, Family
from kproxy_core.nft.watch import Commit, CommitWatch
from kproxy_nftables.names import TABLE


class Watcher(CommitWatch):
    """Reports foreign commits to our tables. The kernel drops our own, so they do not wake an idle proxy."""

    def __init__(self, own_ports: Collection[int], damaged: Damage) -> None:
        """Start watching. *own_ports*: see `CommitWatch`. Raises OSError."""

        def judge(commit: Commit) -> None:
            for family, what in commit.summary(lambda change: change.table == TABLE).items():
                damaged(family, what)

        super().__init__("nftables-watch", own_ports, judge, Family, damaged, ignore=own_ports)
