"""A separate table that counts connections, for modes whose rules cannot."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from kproxy_core.contract import (
    Connections,
    Family,
    Frontend,
    HostError,
    Leftovers,
    Scope,
    ServicePortKey,
    Update,
)
from kproxy_core.linux import programs
from kproxy_core.linux.rulesets import ruleset, table_exists
from kproxy_core.nft.objects import Table
from kproxy_core.nft.transaction import RulesetSocket
from kproxy_nft import counting

log = logging.getLogger("kproxy.nft")


class Counting:
    """Counts connections for one mode, in a table for each IP family.

    If the kernel refuses the table, which is logged once, nothing is counted.
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

        Rejections of a frontend are counted if it has endpoints neither before nor after the sync, so that no
        connection is counted as both rejected and forwarded.
        """
        family = update.family
        resync = update.scope is Scope.RESYNC
        unserved = self._unserved.setdefault(family, {})
        before = {
            key: unserved[key] for key in (list(unserved) if resync else update.changed) if key in unserved}
        after = {
            key: frozenset(plan.frontends())
            for key, plan in (update.plans if resync else update.changed).items()
            if plan is not None and not plan.has_endpoints
        }
        old, new = (frozenset[Frontend]().union(*of.values()) for of in (before, after))
        with self._failures_logged():
            if resync:
                self._complete(family)
                if unserved:  # An earlier process knew which frontends its rules reject.
                    self._replace(family, old & new)
            else:
                self._change(family, deletes=old - new)
        unserved.update({key: frontends & new for key, frontends in before.items()})
        yield
        with self._failures_logged():
            if resync:
                self._replace(family, new)
            else:
                self._change(family, adds=new - old)
        for key in before:
            del unserved[key]
        unserved.update(after)

    def read(self, family: Family) -> list[Connections]:
        """Return the counts of *family*; none without the table. Raises HostError."""
        found: list[Connections] = []
        table = counting.counting_table(family, ipvs=self._ipvs)
        with ruleset(f"read table {table.where}") as connection:
            for name in (counting.CONNECTIONS, counting.REJECTED):
                counted = connection.packets(family, table.name, name)
                found += counting.connections(family, counted.items())
        return [one for one in found if one.endpoint != (one.frontend.address, one.frontend.port)]

    def _complete(self, family: Family) -> None:
        """Create or complete the table, and keep its counts. Raises HostError."""
        tables = [counting.counting_table(family, ipvs=self._ipvs)]
        if self._ipvs and table_exists(family, (other := counting.counting_table(family, ipvs=False)).name):
            tables.append(other)  # It counts until the switch to IPVS is complete.
        layout = counting.counting_layout(family, ipvs=self._ipvs)
        with self._writing(family) as connection:
            for table in tables:
                connection.complete(table, layout, {})

    def _replace(self, family: Family, unserved: Iterable[Frontend]) -> None:
        """Make *unserved* the frontends without endpoints. Raises HostError."""
        table = counting.counting_table(family, ipvs=self._ipvs)
        with self._writing(family) as connection:
            held = {
                name: connection.elements(family, table.name, name) for name in counting.UNSERVED_SETS}
            connection.run(counting.change_unserved(table, held, counting.unserved_elements(unserved)))

    def _change(
        self, family: Family, deletes: Iterable[Frontend] = (), adds: Iterable[Frontend] = ()
    ) -> None:
        """Change the frontends without endpoints. Raises HostError."""
        table = counting.counting_table(family, ipvs=self._ipvs)
        old, new = counting.unserved_elements(deletes), counting.unserved_elements(adds)
        if commands := counting.change_unserved(table, old, new):
            with self._writing(family) as connection:
                connection.run(commands)

    def _writing(self, family: Family) -> AbstractContextManager[RulesetSocket]:
        table = counting.counting_table(family, ipvs=self._ipvs)
        return ruleset(f"change table {table.where}", self._own)

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
            removed += delete_table(counting.counting_table(family, ipvs=ipvs), dry_run=dry_run)
        except HostError as error:
            errors.append(f"{mode}: {error}")
    return Leftovers(tuple(removed), tuple(errors))


def delete_table(table: Table, *, dry_run: bool) -> list[str]:
    """Delete *table*, and return its name; nothing if it does not exist. Raises HostError."""
    if not table_exists(table.family, table.name):
        return []
    if not dry_run:
        with ruleset(f"delete table {table.where}") as connection:
            connection.run([table.delete()])
    return [f"table {table.where}"]
