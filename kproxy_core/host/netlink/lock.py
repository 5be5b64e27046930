"""A lock that belongs to a network namespace, and that only CAP_NET_ADMIN can take.

It is an empty table of nf_tables with NFT_TABLE_F_OWNER (Linux 5.12). The kernel lets one socket own it,
keeps it when other processes flush the ruleset, and deletes it when that socket closes, even after SIGKILL.
"""

import errno
import sys
from typing import Final

from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.sockets import NetlinkSocket

_NFPROTO_INET: Final = 1
_SUBSYSTEM: Final = 10
_NEWTABLE, _GETTABLE = _SUBSYSTEM << 8, _SUBSYSTEM << 8 | 1
_BATCH_BEGIN, _BATCH_END = 16, 17
_NAME, _FLAGS, _OWNER = 1, 2, 7
_F_OWNER: Final = (2).to_bytes(4, "big")
_TAKEN: Final = (errno.EEXIST, errno.EPERM, errno.EBUSY)


class Lock:
    """One lock, as seen by this process, in the network namespace of the thread that made it."""

    def __init__(self, name: str) -> None:
        """Raises OSError."""
        self._socket = NetlinkSocket.open(netlink.NETLINK_NETFILTER)
        self._name = netlink.text_attribute(_NAME, name)
        self._table = netlink.NFGENMSG.pack(_NFPROTO_INET, 0, 0) + self._name

    def acquire(self) -> bool:
        """Take the lock and return True, or return False if another process has it.

        Raises OSError if this kernel does not provide it, or not to this process.
        """
        batch = netlink.NFGENMSG.pack(0, 0, int.from_bytes(_SUBSYSTEM.to_bytes(2, "big"), sys.byteorder))
        flags = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL | netlink.NLM_F_ACK
        data = (
            netlink.message(_BATCH_BEGIN, 0, batch, 1)
            + netlink.message(_NEWTABLE, flags, self._table + netlink.attribute(_FLAGS, _F_OWNER), 2)
            + netlink.message(_BATCH_END, 0, batch, 3)
        )
        refused = self._socket.transact(data, 2)
        if not refused:
            return True
        if refused[0].code not in _TAKEN or not self._is_owned():
            raise refused[0].error
        return False

    def release(self) -> None:
        """Give the lock up."""
        self._socket.close()

    def _is_owned(self) -> bool:
        """Return False if a table of this name exists that no process owns. Raises OSError."""
        try:
            ((data, start, end),) = self._socket.request(_GETTABLE, 0, self._table)
        except FileNotFoundError:  # Released in the meantime.
            return True
        return _OWNER in netlink.attributes(data, start + netlink.NFGENMSG.size, end)
