"""Serves the hook `kproxy_traffic`: the counters of the sets that rules fill."""

from kproxy_core.backend.api import Connections
from kproxy_core.model.address import Family
from kproxy_nft import counting
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.names import REFUSED


def connections(family: Family) -> list[Connections]:
    """Return the new connections counted for each frontend and endpoint. Raises BackendError."""
    with Kernel() as kernel:
        return [
            one for container in (counting.CONNECTIONS, REFUSED)
            for one in counting.connections(family, kernel.counters(family, container).items())
        ]
