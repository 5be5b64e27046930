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
_PRESENT = (errno.EEXIST, errno.EBUSY)


def ensure_counters() -> frozenset[str]:
    """Create the missing objects of `names.COUNTERS`. Return the names of those that exist."""
    requests = [netlink.Request(_NEW, netlink.NLM_F_CREATE, _named(name)) for name in names.COUNTERS]
    try:
        with NetlinkSocket.open(netlink.NETLINK_NETFILTER) as sock:
            refused = {at for at, code in sock.exchange(requests) if code not in _PRESENT}
    except OSError as error:
        log.info("packet counters unavailable", extra={"fields": {"error": str(error)}})
        return frozenset()
    return frozenset(name for at, name in enumerate(names.COUNTERS) if at not in refused)


def read_packets(name: str) -> int | None:
    """Return the packets that the object *name* has counted; None if it does not exist."""
    try:
        with NetlinkSocket.open(netlink.NETLINK_NETFILTER) as sock:
            ((data, start, end),) = sock.request(_GET, 0, _named(name))
    except OSError:
        return None
    found = netlink.attributes(data, start + netlink.NFGENMSG.size, end)
    return int.from_bytes(found[_PACKETS], "big")


def _named(name: str) -> bytes:
    return netlink.NFGENMSG.pack(0, 0, 0) + netlink.text_attribute(_NAME, name)
