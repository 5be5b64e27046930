"""Kernel settings that the rules depend on."""

import logging

from kproxy_core.backend.errors import SyncFailed
from kproxy_core.host import sysctl
from kproxy_core.host.errors import HostError
from kproxy_iptables.skeleton import Facts

log = logging.getLogger("kproxy.iptables")


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
