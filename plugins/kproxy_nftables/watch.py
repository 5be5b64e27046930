"""Detection of foreign changes to our tables, and to the marker in kube-proxy's."""

from collections.abc import Collection

from kproxy_core.contract import Damage, Family
from kproxy_core.linux.rulesets import KUBE_PROXY_TABLE, MARKER
from kproxy_core.nft.watch import Change, ChangeKind, Commit, CommitWatch
from kproxy_nftables.names import TABLE


class Watcher(CommitWatch):
    """Reports foreign commits to our tables. The kernel drops our own, so they do not wake an idle proxy."""

    def __init__(self, own_ports: Collection[int], damaged: Damage, *, marked: bool) -> None:
        """Start watching. *own_ports*: see `CommitWatch`; *marked*: the marker is wanted. Raises OSError."""

        def judge(commit: Commit) -> None:
            def concerns(change: Change) -> bool:
                return change.table == TABLE or (marked and _unmarks(change, commit))

            for family, what in commit.summary(concerns).items():
                damaged(family, what)

        super().__init__("nftables-watch", own_ports, judge, Family, damaged, ignore=own_ports)


def _unmarks(change: Change, commit: Commit) -> bool:
    """Return whether a change deletes the marker, unless its commit creates it again."""
    of_marker = change.kind is ChangeKind.CHAIN_DELETED and change.name == MARKER
    return (
        change.table == KUBE_PROXY_TABLE and (of_marker or change.kind is ChangeKind.TABLE_DELETED)
        and Change(change.family, ChangeKind.CHAIN_ADDED, KUBE_PROXY_TABLE, MARKER) not in commit.changes)
