"""A table of its own that counts connections, for modes whose rules cannot."""

import errno
from functools import partial

from kproxy_core.backend.api import Connections
from kproxy_core.host import programs
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family
from kproxy_nft import counting
from kproxy_nft.elements import complete, parse_counters

TABLE = "kproxy-counts"

_GETTABLE, _GETSETELEM = nf_tables.KIND | 1, nf_tables.KIND | 13
_TABLE_NAME, _SET_NAME = 1, 2


class CountingTable:
    def __init__(self, family: Family) -> None:
        self._family = family
        self.name = f"{family.ip} {TABLE}"

    def exists(self) -> bool:
        """Return whether the kernel has the table. False where it cannot be asked."""
        try:
            with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
                return bool(sock.request(_GETTABLE, 0, self._request()))
        except OSError:
            return False

    def write(self, own: programs.OwnProcesses | None = None) -> None:
        """Create or complete the table, and keep its counts. Raises HostError."""
        programs.output("nft", "-f", "-", stdin=counting.counting_table(self._family, TABLE), own=own)

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
        return counting.connections(self._family, counted.items())

    def _request(self) -> bytes:
        return nf_tables.payload(self._family, text_attribute(_TABLE_NAME, TABLE))


def clean_up_counts(mode: str, *, dry_run: bool) -> tuple[list[str], list[str]]:
    """Delete the tables of both families. Return the removed objects, and the errors."""
    removed: list[str] = []
    errors: list[str] = []
    for table in map(CountingTable, Family):
        if not table.exists():
            continue
        try:
            if not dry_run:
                table.delete()
            removed.append(f"table {table.name}")
        except HostError as error:
            errors.append(f"{mode}: {error}")
    return removed, errors
