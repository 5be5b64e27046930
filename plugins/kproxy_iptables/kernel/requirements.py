"""What the rules depend on in this kernel, besides its tables."""

import logging

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import sysctl
from kproxy_core.host.errors import HostError
from kproxy_iptables.kernel.accounting import ensure_counters
from kproxy_iptables.skeleton import Facts

log = logging.getLogger("kproxy.iptables")


def read_facts() -> Facts:
    """What this kernel can do, as far as rules depend on it. Makes the accounting objects."""
    try:
        liberal = sysctl.read("net/netfilter/nf_conntrack_tcp_be_liberal") != "0"
    except HostError:
        liberal = False
    return Facts(liberal=liberal, counters=ensure_counters())


def enable_route_localnet() -> None:
    """Let packets to 127.0.0.0/8 be routed, which node ports on localhost need. Raises SyncFailed."""
    try:
        if sysctl.ensure("net/ipv4/conf/all/route_localnet", 1):
            log.info("node ports are served on localhost: route_localnet is now 1")
    except HostError as error:
        raise SyncFailed(f"{error}; iptables.localhostNodePorts needs it") from error
