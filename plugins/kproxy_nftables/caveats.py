"""What this mode does not do as other modes do. Pure."""

from collections.abc import Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports


def caveats(update: Update) -> Sequence[Caveat]:
    """Node ports: kube-proxy 1.36's nftables mode never serves them on loopback either (KEP-3866)."""
    return tuple(of_node_ports(update, loopback=False, any_local_address=True))
