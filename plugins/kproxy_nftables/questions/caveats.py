"""Deviations of this mode from the others."""

from collections.abc import Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports


def caveats(update: Update) -> Sequence[Caveat]:
    """Return the node ports that this mode does not serve.

    kube-proxy 1.36's nftables mode does not serve them on loopback either (KEP-3866).
    """
    return tuple(of_node_ports(update, loopback=False, any_local_address=True))
