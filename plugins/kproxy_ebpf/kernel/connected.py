"""Connected UDP sockets that programs sent to an endpoint: destroyed when that endpoint is removed.

A program sees the connect() of such a socket but none of its datagrams, so it cannot move it elsewhere.
"""

import logging
from collections.abc import Mapping

from kproxy_core.host.errors import HostError
from kproxy_core.host.namespaces import in_network_namespaces
from kproxy_core.host.netlink.udp_sockets import UdpSocket, connected_udp_sockets, destroy_udp_sockets
from kproxy_core.model.address import Family
from kproxy_ebpf.batch import PRESENT, address_key, cookie_key, parse_endpoint
from kproxy_ebpf.kernel import bpf

log = logging.getLogger("kproxy.ebpf")


def destroy_connected_sockets(connected: int, definition: bpf.MapDefinition, endpoints: int) -> None:
    """Destroy the sockets that are connected to endpoints that no longer exist.

    *connected* is the map in which the programs note sockets, *endpoints* that of endpoints. Spares sockets
    that were connected elsewhere since, and namespaces that this process may not enter. Raises OSError.
    """
    noted = dict(bpf.elements(connected, definition))
    removed = {one for one in set(noted.values()) if bpf.lookup(endpoints, one, len(PRESENT)) is None}
    stale = {cookie: endpoint for cookie, endpoint in noted.items() if endpoint in removed}
    if not stale:
        return
    destroyed = 0

    def destroy() -> None:
        nonlocal destroyed
        destroyed += destroy_udp_sockets(one for one in connected_udp_sockets() if _is_stale(one, stale))

    try:
        in_network_namespaces(destroy)
    except HostError as error:
        log.warning("connected UDP sockets keep a removed endpoint", extra={"fields": {"error": str(error)}})
    if destroyed:
        log.info("destroyed connected UDP sockets", extra={"fields": {"sockets": destroyed}})
    bpf.delete_all(connected, list(stale))


def _is_stale(found: UdpSocket, stale: Mapping[bytes, bytes]) -> bool:
    endpoint, (address, port) = stale.get(cookie_key(found.cookie)), found.peer
    return endpoint is not None and (address_key(address), port) == parse_endpoint(endpoint, Family.IPV6)
