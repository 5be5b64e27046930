"""Serves the hook `kproxy_traffic`: the counters of the sets that rules fill."""

from kproxy_core.backend.api import Connections
from kproxy_core.model.address import Address, Family
from kproxy_core.plan.service_plan import Frontend
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import CONNECTIONS, REFUSED
from kproxy_nftables.wanted import PORT_KEY_SIZE, parse_destination, parse_port_key


def connections(family: Family) -> list[Connections]:
    """Return the new connections counted for each frontend and endpoint. Raises BackendError."""
    size = family.size
    rest = size + PORT_KEY_SIZE
    frontends: dict[bytes, Frontend] = {}
    found: list[Connections] = []
    with Kernel() as kernel:
        for container in (CONNECTIONS, REFUSED):
            for key, number in kernel.counters(family, container).items():
                dialled = key[:rest]
                frontend = frontends.get(dialled)
                if frontend is None:
                    frontend = Frontend(Address(key[:size]), *parse_port_key(key[size:rest]))
                    frontends[dialled] = frontend
                endpoint = parse_destination(key[rest:]) if container == CONNECTIONS else None
                found.append(Connections(frontend, endpoint, number))
    return found
