"""Names of the chains: those that operators know from kube-proxy's iptables mode.

Fixed chains carry their purpose in the name. Chains of a service port end in a hash
of what they belong to, so that a name stays the same on every node and in every run
(kube-proxy 1.36, pkg/proxy/iptables/proxier.go).
"""

import base64
import hashlib
import re
from typing import NamedTuple

from kproxy_core.model.service import ServicePortKey

FILTER, NAT, MANGLE = "filter", "nat", "mangle"

SERVICES = "KUBE-SERVICES"
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
NODE_PORTS = "KUBE-NODEPORTS"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
CANARY = "KUBE-PROXY-CANARY"
KUBELET_FIREWALL = "KUBE-FIREWALL"
"""Kubelet's too: rules are added to it, it is never flushed or deleted."""

FIXED_CHAINS = {
    NAT: (SERVICES, NODE_PORTS, POSTROUTING, MARK_MASQ),
    FILTER: (SERVICES, EXTERNAL_SERVICES, FORWARD, NODE_PORTS, PROXY_FIREWALL),
}
"""The chains that exist once, by table; the canaries and kubelet's chain not among them."""

CANARY_TABLES = (MANGLE, NAT, FILTER)

SERVICE_PREFIXES = ("KUBE-FW-", "KUBE-XLB-", "KUBE-EXT-", "KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-")
"""How the names of chains that belong to one service port begin; each kind leads to later ones only.
All are in nat. ``KUBE-XLB-`` is what kube-proxy up to 1.23 had instead of ``KUBE-EXT-``."""

_SERVICE_CHAIN = re.compile(rf"(?:{'|'.join(SERVICE_PREFIXES)})[A-Z2-7]{{16}}")

INVALID_COUNTER = "ct_state_invalid_dropped_pkts"
LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"
COUNTERS = (INVALID_COUNTER, LOCALHOST_COUNTER)
"""Accounting objects (nfacct) that some rules count with."""

OUR_CHAINS = frozenset(
    [(table, chain) for table, chains in FIXED_CHAINS.items() for chain in chains]
    + [(table, CANARY) for table in CANARY_TABLES]
)
"""Table and name of every chain that is this mode's, those of service ports excepted."""



def is_ours(table: str, chain: str) -> bool:
    """Whether a chain is this mode's; kubelet's is not."""
    return (table, chain) in OUR_CHAINS or is_service_chain(table, chain)


def is_service_chain(table: str, chain: str) -> bool:
    """Whether a chain is a service port's: one of the prefixes, then a hash."""
    return table == NAT and _SERVICE_CHAIN.fullmatch(chain) is not None


class ServiceChains(NamedTuple):
    """The names of a service port's chains."""

    cluster: str
    """To its endpoints anywhere."""
    local: str
    """To its endpoints on this node."""
    external: str
    """What comes to external addresses and node ports."""
    firewall: str
    """The source ranges in front of load balancer addresses."""
    endpoint_seed: str
    """What to give to `endpoint_chain`."""


def service_chains(key: ServicePortKey) -> ServiceChains:
    """The names of the chains of the service port *key*."""
    seed = f"{key}{key.protocol.name.lower()}"
    suffix = _hash(seed)
    return ServiceChains(
        f"KUBE-SVC-{suffix}", f"KUBE-SVL-{suffix}", f"KUBE-EXT-{suffix}", f"KUBE-FW-{suffix}", seed
    )


def endpoint_chain(seed: str, where: str) -> str:
    """The name of the chain for the endpoint *where*, as ``address:port``."""
    return f"KUBE-SEP-{_hash(seed + where)}"


def _hash(text: str) -> str:
    # 10 bytes are exactly 16 characters of base32.
    return base64.b32encode(hashlib.sha256(text.encode()).digest()[:10]).decode()
