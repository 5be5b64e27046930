"""The kernel's accounting objects (linux/netfilter/nfnetlink_acct.h), with which some rules count packets.

In a kernel without them the same rules are written without the match that counts.
"""

import errno
import logging

from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_iptables import names

log = logging.getLogger("kproxy.iptables")

_NEW, _GET = 7 << 8, 7 << 8 | 1
_NAME, _PACKETS = 1, 2
_HEADER = netlink.NFGENMSG.pack(0, 0, 0)


def ensure_counters() -> frozenset[str]:
    """Create the missing objects of `names.COUNTERS`. Return the names of those that exist."""
    present: set[str] = set()
    try:
        with NetlinkSocket.open(netlink.NETLINK_NETFILTER) as sock:
            for name in names.COUNTERS:
                if _ensure(sock, name):
                    present.add(name)
    except OSError as error:
        log.info("packet counters unavailable", extra={"fields": {"error": str(error)}})
    return frozenset(present)


def _ensure(sock: NetlinkSocket, name: str) -> bool:
    try:
        sock.request(_NEW, netlink.NLM_F_CREATE, _HEADER + netlink.text_attribute(_NAME, name))
    except OSError as error:
        return error.errno in (errno.EEXIST, errno.EBUSY)
    return True


def read_packets(name: str) -> int | None:
    """Return the packets that the object *name* has counted; None if it does not exist."""
    try:
        with NetlinkSocket.open(netlink.NETLINK_NETFILTER) as sock:
            answers = sock.request(_GET, 0, _HEADER + netlink.text_attribute(_NAME, name))
    except OSError:
        return None
    for data, start, end in answers:
        found = netlink.attributes(data, start + len(_HEADER), end)
        if _PACKETS in found:
            return int.from_bytes(found[_PACKETS], "big")
    return None
