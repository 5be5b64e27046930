"""Names of the mode's chains (kube-proxy 1.25, pkg/proxy/userspace) and table."""

PORTALS_CONTAINER = "KUBE-PORTALS-CONTAINER"
PORTALS_HOST = "KUBE-PORTALS-HOST"
NODE_PORT_CONTAINER = "KUBE-NODEPORT-CONTAINER"
NODE_PORT_HOST = "KUBE-NODEPORT-HOST"
NON_LOCAL = "KUBE-NODEPORT-NON-LOCAL"

PORTAL_CHAINS = (PORTALS_CONTAINER, PORTALS_HOST, NODE_PORT_CONTAINER, NODE_PORT_HOST)
"""Our chains of the nat table. `NON_LOCAL` is the only one of the filter table."""
OUR_CHAINS = (*(("nat", chain) for chain in PORTAL_CHAINS), ("filter", NON_LOCAL))
"""Table and name of each."""

TABLE = "kproxy-userspace"
"""The nftables table that holds the portals on a machine without iptables."""
