"""A table of its own that counts connections, for modes whose rules cannot."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kproxy_core.backend.api import Connections, Leftovers, Scope, Update
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_objects, nf_tables
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend
from kproxy_nft import counting
from kproxy_nft.elements import complete, parse_counters

log = logging.getLogger("kproxy.nft")

_GETSETELEM = nf_tables.KIND | 13
_SET_NAME = 2
_TABLES = {False: "kproxy-counts", True: "kproxy-ipvs-counts"}
"""The table, by whether it counts with IPVS."""


class Counting:
    """Counts connections for one mode, in a table for each IP family.

    Without nft, which is logged once, none are counted.
    """

    def __init__(self, *, ipvs: bool = False, own: programs.OwnProcesses | None = None) -> None:
        """*ipvs*: count with IPVS, too."""
        self._ipvs = ipvs
        self._own = own
        self._failed = False
        self._unserved: dict[Family, dict[ServicePortKey, frozenset[Frontend]]] = {}
        """Frontends without endpoints."""

    @contextmanager
    def during(self, update: Update) -> Iterator[None]:
        """Count while *update* is synced, and from then on.

        Rejections of a frontend are counted if it has endpoints neither before nor after the sync: none is
        counted as rejected and as forwarded.
        """
        table = f"{update.family.ip} {_TABLES[self._ipvs]}"
        resync = update.scope is Scope.RESYNC
        unserved = self._unserved.setdefault(update.family, {})
        before = {
            key: unserved[key] for key in (list(unserved) if resync else update.changed) if key in unserved}
        after = {
            key: frozenset(plan.frontends())
            for key, plan in (update.plans if resync else update.changed).items()
            if plan is not None and not plan.has_endpoints
        }
        old, new = (frozenset[Frontend]().union(*of.values()) for of in (before, after))
        with self._failures_logged():
            if not resync:
                self._send(counting.change_unserved("delete", table, old - new))
            elif unserved:
                self._send(self._creation(update.family) + counting.replace_unserved(table, old & new))
            else:  # An earlier process knew which frontends its rules reject.
                self._send(self._creation(update.family))
        unserved.update({key: frontends & new for key, frontends in before.items()})
        yield
        with self._failures_logged():
            if resync:
                self._send(counting.replace_unserved(table, new))
            else:
                self._send(counting.change_unserved("add", table, new - old))
        for key in before:
            del unserved[key]
        unserved.update(after)

    def read(self, family: Family) -> list[Connections]:
        """Return the counts of *family*; none without the table. Raises HostError."""
        found: list[Connections] = []
        try:
            with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
                for name in (counting.CONNECTIONS, counting.REJECTED):
                    container = nf_tables.payload(
                        family, text_attribute(nf_tables.TABLE_NAME, _TABLES[self._ipvs]),
                        text_attribute(_SET_NAME, name))
                    counted = sock.dump(_GETSETELEM, container, partial(complete, parse_counters))
                    found += counting.connections(family, counted.items())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise HostError(f"cannot read table {family.ip} {_TABLES[self._ipvs]}", error) from error
        return [one for one in found if one.endpoint != (one.frontend.address, one.frontend.port)]

    def _creation(self, family: Family) -> str:
        """Return the commands that create or complete the table, and keep its counts. Raises HostError."""
        tables = [_TABLES[self._ipvs]]
        if self._ipvs and nf_objects.table_exists(family, _TABLES[False]):
            tables.append(_TABLES[False])  # It counts until the switch to IPVS is complete.
        return "".join(counting.counting_table(family, table, ipvs=self._ipvs) for table in tables)

    def _send(self, commands: str) -> None:
        if commands:
            programs.output("nft", "-f", "-", stdin=commands, own=self._own)

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except HostError as error:
            if not self._failed:
                log.warning("connections are not counted", extra={"fields": {"error": str(error)}})
            self._failed = True


def clean_up_counts(mode: str, *, dry_run: bool, ipvs: bool = False) -> Leftovers:
    """Delete the tables of both families."""
    removed: list[str] = []
    errors: list[str] = []
    for family in Family:
        try:
            removed += delete_table(family, _TABLES[ipvs], dry_run=dry_run)
        except HostError as error:
            errors.append(f"{mode}: {error}")
    return Leftovers(mode, tuple(removed), tuple(errors))


def delete_table(family: Family, name: str, *, dry_run: bool) -> list[str]:
    """Delete a table, and return its name; nothing if it does not exist. Raises HostError."""
    if not nf_objects.table_exists(family, name):
        return []
    table = f"table {family.ip} {name}"
    if not dry_run:
        programs.output("nft", "-f", "-", stdin=f"delete {table}\n")
    return [table]
