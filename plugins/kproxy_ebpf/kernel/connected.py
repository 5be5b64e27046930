"""Connected UDP sockets that programs sent to an endpoint: destroyed when that endpoint is removed.

A program sees the connect() of such a socket but none of its datagrams, so it cannot move it elsewhere.
"""

import logging
from collections.abc import Callable

from kproxy_core.host.errors import HostError
from kproxy_core.host.namespaces import in_network_namespaces
from kproxy_core.host.netlink.udp_sockets import connected_udp_sockets, destroy_udp_sockets
from kproxy_core.model.address import Address
from kproxy_ebpf.batch import address_key, number, parse_connection
from kproxy_ebpf.kernel import bpf

log = logging.getLogger("kproxy.ebpf")


def destroy_connected_sockets(
    connected: int, definition: bpf.MapDefinition, is_removed: Callable[[int], bool]
) -> None:
    """Destroy the sockets connected to endpoints that are removed, by id.

    *connected* is the map in which the programs note them. Sockets that have been connected elsewhere since
    are spared, as are namespaces that this process may not enter. Raises OSError if the map cannot be read.
    """
    stale = {}
    for cookie, value in bpf.elements(connected, definition):
        address, port, endpoint = parse_connection(value)
        if is_removed(endpoint):
            stale[cookie] = address, port
    if not stale:
        return
    destroyed = 0

    def destroy() -> None:
        nonlocal destroyed
        found = connected_udp_sockets()
        destroyed += destroy_udp_sockets(
            one for one in found if stale.get(number(one.cookie)) == _peer(one.peer))

    try:
        in_network_namespaces(destroy)
    except HostError as error:
        log.warning("connected UDP sockets keep a removed endpoint", extra={"fields": {"error": str(error)}})
    if destroyed:
        log.info("destroyed connected UDP sockets", extra={"fields": {"sockets": destroyed}})
    bpf.delete_all(connected, list(stale))


def _peer(where: tuple[Address, int]) -> tuple[Address, int]:
    address, port = where
    return Address(address_key(address)), port
