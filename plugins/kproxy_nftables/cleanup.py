"""Removal of every trace of the mode: our tables, and those of kube-proxy's nftables mode."""

from kproxy_core.contract import BackendError, Family, Leftovers
from kproxy_core.nft.objects import Table
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import TABLE

_KUBE_PROXY_TABLE = "kube-proxy"


def cleanup(*, dry_run: bool, own_only: bool = False) -> Leftovers:
    """Delete our tables and, unless *own_only*, kube-proxy's."""
    return _deleted((TABLE,) if own_only else (TABLE, _KUBE_PROXY_TABLE), dry_run)


def supersede(*, dry_run: bool) -> Leftovers:
    """Delete kube-proxy's tables."""
    return _deleted((_KUBE_PROXY_TABLE,), dry_run)


def _deleted(names: tuple[str, ...], dry_run: bool) -> Leftovers:
    removed: list[str] = []
    errors: list[str] = []
    with Kernel() as kernel:
        try:
            present = [
                (family, name) for family in Family for name in names if kernel.has_table(family, name)
            ]
        except BackendError as error:
            return Leftovers(errors=(str(error),))
        for family, name in present:
            table = f"table {family.ip} {name}"
            try:
                if not dry_run:
                    kernel.run([Table(family, name).delete()])
                removed.append(table)
            except BackendError as error:
                errors.append(f"{table}: {error}")
    return Leftovers(tuple(removed), tuple(errors))
