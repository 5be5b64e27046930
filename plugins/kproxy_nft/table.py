"""A table of its own that counts connections, for modes whose rules cannot."""

import errno
import logging
from functools import partial

from kproxy_core.backend.api import Connections, Leftovers
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family
from kproxy_nft import counting
from kproxy_nft.elements import complete, parse_counters

log = logging.getLogger("kproxy.nft")

_GETTABLE, _GETSETELEM = nf_tables.KIND | 1, nf_tables.KIND | 13
_TABLE_NAME, _SET_NAME = 1, 2


class CountingTable:
    """The table of one IP family: ``kproxy-counts``, or ``kproxy-ipvs-counts`` that counts with IPVS, too."""

    def __init__(self, family: Family, *, ipvs: bool = False) -> None:
        self._family = family
        self._ipvs = ipvs
        self._table = "kproxy-ipvs-counts" if ipvs else "kproxy-counts"
        self.name = f"{family.ip} {self._table}"

    def exists(self) -> bool:
        """Return whether the kernel has the table. False where it cannot be asked."""
        try:
            with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
                return bool(sock.request(_GETTABLE, 0, self._request()))
        except OSError:
            return False

    def write(self, own: programs.OwnProcesses | None = None) -> None:
        """Create or complete the table, and keep its counts. Raises HostError."""
        tables = [self._table]
        if self._ipvs and (other := CountingTable(self._family)).exists():
            tables.append(other._table)  # It counts until the switch to IPVS is complete.
        text = "".join(counting.counting_table(self._family, table, ipvs=self._ipvs) for table in tables)
        programs.output("nft", "-f", "-", stdin=text, own=own)

    def delete(self) -> None:
        """Delete the table with its counts. Raises HostError."""
        programs.output("nft", "-f", "-", stdin=f"delete table {self.name}\n")

    def read(self) -> list[Connections]:
        """Return the counts; none without the table. Raises HostError."""
        container = self._request() + text_attribute(_SET_NAME, counting.CONNECTIONS)
        try:
            with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
                counted = sock.dump(_GETSETELEM, container, partial(complete, parse_counters))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return []
            raise HostError(f"cannot read table {self.name}", error) from error
        found = counting.connections(self._family, counted.items())
        return [one for one in found if one.endpoint != (one.frontend.address, one.frontend.port)]

    def _request(self) -> bytes:
        return nf_tables.payload(self._family, text_attribute(_TABLE_NAME, self._table))


class Counting:
    """Counts connections for one mode. Without nft, which is logged once, none are counted."""

    def __init__(self, *, ipvs: bool = False, own: programs.OwnProcesses | None = None) -> None:
        self._ipvs = ipvs
        self._own = own
        self._failed = False

    def ensure(self, family: Family) -> None:
        """Create or complete the table of *family*."""
        try:
            CountingTable(family, ipvs=self._ipvs).write(self._own)
        except HostError as error:
            if not self._failed:
                log.warning("connections are not counted", extra={"fields": {"error": str(error)}})
            self._failed = True

    def read(self, family: Family) -> list[Connections]:
        """Return the counts of *family*. Raises HostError."""
        return CountingTable(family, ipvs=self._ipvs).read()


def clean_up_counts(mode: str, *, dry_run: bool, ipvs: bool = False) -> Leftovers:
    """Delete the tables of both families."""
    removed: list[str] = []
    errors: list[str] = []
    for table in [CountingTable(family, ipvs=ipvs) for family in Family]:
        if not table.exists():
            continue
        try:
            if not dry_run:
                table.delete()
            removed.append(f"table {table.name}")
        except HostError as error:
            errors.append(f"{mode}: {error}")
    return Leftovers(mode, tuple(removed), tuple(errors))
