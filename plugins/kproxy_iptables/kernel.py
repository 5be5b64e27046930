"""Input and output of the mode: tables, accounting objects and settings."""

import errno
import logging

from kproxy_core.contract import HostError, SyncFailed
from kproxy_core.linux import sysctl
from kproxy_core.netlink import messages as netlink
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_iptables import names
from kproxy_iptables.applied import Observed, fingerprint
from kproxy_iptables.skeleton import Facts
from kproxy_xtables.tables import Tables

log = logging.getLogger("kproxy.iptables")

_NEW, _GET = 7 << 8, 7 << 8 | 1
_NAME, _PACKETS = 1, 2
_PRESENT = (errno.EEXIST, errno.EBUSY)


def read(tables: Tables) -> Observed:
    """Read the chains and rules of one family that matter to this mode. Raises HostError."""
    observed = Observed()
    for saved in tables.save():
        table, chain, lines = saved
        if names.is_service_chain(table, chain):
            observed.service_chains[chain] = fingerprint("".join(lines))
        elif names.is_ours(table, chain) or chain == names.KUBELET_FIREWALL:
            observed.chains[table, chain] = saved.rules
        else:
            jumps = [line for line in lines if "-j KUBE-" in line]
            observed.chains[table, chain] = saved._replace(lines=jumps).rules
    return observed


# Accounting objects (linux/netfilter/nfnetlink_acct.h), with which some rules count packets. In a kernel
# without them the same rules are written without the match that counts.

def ensure_counters() -> frozenset[str]:
    """Create the missing objects of `names.COUNTERS`. Return the names of those that exist."""
    requests = [netlink.NetlinkRequest(_NEW, netlink.NLM_F_CREATE, _named(name)) for name in names.COUNTERS]
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
            data, start, end = sock.request_one(_GET, _named(name))
        with netlink.decoding("an accounting object"):
            found = netlink.attributes(data, start + netlink.NFGENMSG.size, end)
            return int.from_bytes(found[_PACKETS], "big")
    except OSError:
        return None


def _named(name: str) -> bytes:
    return netlink.NFGENMSG.pack(0, 0, 0) + netlink.text_attribute(_NAME, name)


# Settings.

def read_facts(counters: frozenset[str], *, localhost_node_ports: bool) -> Facts:
    """Read the kernel's settings. *counters* are the existing accounting objects."""
    try:
        liberal = sysctl.read("net/netfilter/nf_conntrack_tcp_be_liberal") != "0"
    except HostError:
        liberal = False
    return Facts(liberal=liberal, counters=counters, localhost_node_ports=localhost_node_ports)


def enable_route_localnet() -> None:
    """Let the kernel route 127.0.0.0/8, which node ports on localhost require. Raises SyncFailed."""
    try:
        if sysctl.ensure("net/ipv4/conf/all/route_localnet", 1):
            log.info("route_localnet enabled for node ports on localhost")
    except HostError as error:
        raise SyncFailed(f"{error}; iptables.localhostNodePorts requires it") from error
