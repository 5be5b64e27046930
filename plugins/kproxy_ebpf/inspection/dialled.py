"""Serves the hook `kproxy_dialled`: the frontend that a socket remembers."""

from collections.abc import Iterator

from kproxy_core.host.errors import HostError
from kproxy_core.host.namespaces import in_network_namespaces
from kproxy_core.model.address import Protocol, family_of
from kproxy_core.model.endpoint import Destination
from kproxy_ebpf.batch import address_key, parse_endpoint, parse_frontend, parse_peer
from kproxy_ebpf.kernel.storage import stored_values


def dialled(source: Destination, endpoint: Destination) -> Destination | None:
    """Return the frontend that the TCP socket at *source* dialled. Raises HostError.

    The sockets of pods are in other network namespaces, which are searched last.
    """
    found: list[Destination] = []

    def look() -> None:
        found.extend(_frontends(source, endpoint))

    look()
    if not found:
        try:
            in_network_namespaces(look)
        except HostError:
            if not found:
                raise
    return found[0] if found else None


def _frontends(source: Destination, endpoint: Destination) -> Iterator[Destination]:
    for address, value in stored_values(Protocol.TCP, source.port):
        if address_key(address) != address_key(source.address):
            continue
        peer = parse_peer(value)
        if peer is not None and parse_endpoint(peer[1], family_of(endpoint.address)) == endpoint:
            to, _, port = parse_frontend(peer[0])
            yield Destination(to, port)
