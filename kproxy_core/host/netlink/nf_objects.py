"""Tables and chains of nf_tables, looked up by name."""

import errno
from typing import Final

from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import NETLINK_NETFILTER, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Family

_CHAIN_NAME: Final = 3
_ABSENT: Final = (errno.ENOENT, errno.EINVAL, errno.EPROTONOSUPPORT)
"""No such object, a kernel without nf_tables, a kernel without netfilter's netlink (nfnetlink.c)."""


def table_exists(family: Family, table: str) -> bool:
    """Return whether *table* exists, which it does not in a kernel without nf_tables. Raises HostError."""
    return _exists(nf_tables.GETTABLE, family, table)


def chain_exists(family: Family, table: str, chain: str) -> bool:
    """Return whether *chain* exists, as `table_exists` does. Raises HostError."""
    return _exists(nf_tables.GETCHAIN, family, table, text_attribute(_CHAIN_NAME, chain))


def _exists(kind: int, family: Family, table: str, *attributes: bytes) -> bool:
    request = nf_tables.payload(family, text_attribute(nf_tables.TABLE_NAME, table), *attributes)
    try:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            return bool(sock.request(kind, 0, request))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise HostError(f"cannot look up table {family.ip} {table}", error) from error
