"""What this mode calls an endpoint, and the names of its rules (kube-proxy 1.25, pkg/proxy/userspace)."""

PORTALS_CONTAINER = "KUBE-PORTALS-CONTAINER"
PORTALS_HOST = "KUBE-PORTALS-HOST"
NODE_PORT_CONTAINER = "KUBE-NODEPORT-CONTAINER"
NODE_PORT_HOST = "KUBE-NODEPORT-HOST"
NON_LOCAL = "KUBE-NODEPORT-NON-LOCAL"

TABLE = "kproxy-userspace"
"""The nftables table that holds the same where there is no iptables."""

Endpoint = tuple[str, int]
"""Address as text, and port: what connect(2) is given."""
