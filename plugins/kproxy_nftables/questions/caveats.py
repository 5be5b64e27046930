"""Deviations of this mode from the others."""

from collections.abc import Sequence

from kproxy_core.backend.api import Caveat, Update
from kproxy_core.backend.caveats import of_node_ports


def caveats(update: Update) -> Sequence[Caveat]:
    """Return the node ports that are not served: on loopback, as with kube-proxy's mode (KEP-3866)."""
    return tuple(of_node_ports(update, loopback=False, any_local_address=True))
