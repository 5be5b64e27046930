"""Removal of every trace of the mode: our tables, the marker, and those of kube-proxy's nftables mode."""

from collections.abc import Callable, Sequence
from functools import partial

from kproxy_core.contract import BackendError, Family, HostError, Leftovers
from kproxy_core.linux.rulesets import (
    KUBE_PROXY_TABLE,
    MARKER,
    has_kube_proxy,
    has_marker,
    marker_changes,
    marker_creation,
)
from kproxy_core.nft.messages import Command
from kproxy_core.nft.objects import Table
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import TABLE

Removal = tuple[str, Sequence[Command]]
"""The name of an object, and the commands that remove it."""
_Find = Callable[[Kernel, Family], Removal | None]


def cleanup(*, dry_run: bool, own_only: bool = False) -> Leftovers:
    """Delete our tables, and kube-proxy's; with *own_only*, of these the marker alone."""
    others = _marker if own_only else partial(_table, KUBE_PROXY_TABLE)
    return _removed((partial(_table, TABLE), others), dry_run)


def supersede(*, dry_run: bool) -> Leftovers:
    """Delete kube-proxy's tables, but not the marker in them."""
    return _removed((_superseded,), dry_run)


def _marker(_: Kernel, family: Family) -> Removal | None:
    commands = marker_changes(family, wanted=False)
    return (f"chain {MARKER} of table {family.ip} {KUBE_PROXY_TABLE}", commands) if commands else None


def _table(name: str, kernel: Kernel, family: Family) -> Removal | None:
    table = Table(family, name)
    return (f"table {table.where}", [table.delete()]) if kernel.has_table(family, name) else None


def _superseded(_: Kernel, family: Family) -> Removal | None:
    """One transaction replaces the table by one with the marker: there always is a chain."""
    if not has_kube_proxy(family):
        return None
    table = Table(family, KUBE_PROXY_TABLE)
    kept = marker_creation(family) if has_marker(family) else ()
    return f"table {table.where}", [table.delete(), *kept]


def _removed(finds: Sequence[_Find], dry_run: bool) -> Leftovers:
    removed: list[str] = []
    errors: list[str] = []
    with Kernel() as kernel:
        try:
            present = [
                found for family in Family for find in finds if (found := find(kernel, family)) is not None]
        except (BackendError, HostError) as error:
            return Leftovers(errors=(str(error),))
        for what, commands in present:
            try:
                if not dry_run:
                    kernel.run(commands)
                removed.append(what)
            except BackendError as error:
                errors.append(f"{what}: {error}")
    return Leftovers(tuple(removed), tuple(errors))
