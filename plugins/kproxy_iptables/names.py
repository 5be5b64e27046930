"""Chain names, the same as in kube-proxy's iptables mode (1.36, pkg/proxy/iptables/proxier.go)."""

import base64
import hashlib
import re
from typing import NamedTuple

from kproxy_core.contract import ServicePortKey

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
"""Shared with kubelet: rules are added to it, but it is never flushed or deleted."""

TABLES = (MANGLE, NAT, FILTER)
"""Each has a canary."""

SERVICE_PREFIXES = ("KUBE-FW-", "KUBE-XLB-", "KUBE-EXT-", "KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-")
"""Prefixes of the chains of one service port, all in nat; each kind jumps to later ones only, but those of
`GROUPED` also to groups of their own kind. Up to 1.23, kube-proxy had ``KUBE-XLB-`` instead of ``KUBE-EXT-``.
"""

ENDPOINT_PREFIX = SERVICE_PREFIXES[-1]

GROUPED = ("KUBE-SVC-", "KUBE-SVL-")
"""Prefixes of the chains that choose an endpoint."""

_SERVICE_CHAIN = re.compile(rf"(?:{'|'.join(SERVICE_PREFIXES)})[A-Z2-7]{{16}}")

INVALID_COUNTER = "ct_state_invalid_dropped_pkts"
LOCALHOST_COUNTER = "localhost_nps_accepted_pkts"
COUNTERS = (INVALID_COUNTER, LOCALHOST_COUNTER)
"""Accounting objects (nfacct) with which some rules count packets."""

OUR_CHAINS = frozenset([
    *((NAT, chain) for chain in (SERVICES, NODE_PORTS, POSTROUTING, MARK_MASQ)),
    *((FILTER, chain) for chain in (SERVICES, EXTERNAL_SERVICES, FORWARD, NODE_PORTS, PROXY_FIREWALL)),
    *((table, CANARY) for table in TABLES),
])  # fmt: skip
"""Table and name of every chain of this mode, except those of service ports."""


def is_ours(table: str, chain: str) -> bool:
    """Return whether a chain is this mode's. Kubelet's chain is not."""
    return (table, chain) in OUR_CHAINS or is_service_chain(table, chain)


def is_service_chain(table: str, chain: str) -> bool:
    """Return whether a chain belongs to a service port: its name is one of the prefixes and a hash."""
    return table == NAT and _SERVICE_CHAIN.fullmatch(chain) is not None


class ServiceChains(NamedTuple):
    cluster: str
    """Chooses among the endpoints on all nodes."""
    local: str
    """Chooses among the endpoints on this node."""
    external: str
    """Entry for external addresses and node ports."""
    firewall: str
    """Admits the source ranges of load balancer addresses."""
    endpoint_seed: str
    """The first argument of `endpoint_chain`."""


def service_chains(key: ServicePortKey) -> ServiceChains:
    seed = f"{key}{key.protocol.name.lower()}"
    suffix = _hash(seed)
    return ServiceChains(
        f"KUBE-SVC-{suffix}", f"KUBE-SVL-{suffix}", f"KUBE-EXT-{suffix}", f"KUBE-FW-{suffix}", seed
    )


def endpoint_chain(seed: str, where: str) -> str:
    return f"{ENDPOINT_PREFIX}{_hash(seed + where)}"


def group_chain(chain: str, group: str) -> str:
    """Return the name of the chain for a *group* of the endpoints of *chain*, one of `GROUPED`.

    kube-proxy has no such chains; by this name it deletes them as its own.
    """
    prefix, dash, _ = chain.rpartition("-")
    return prefix + dash + _hash(chain + group)


def _hash(text: str) -> str:
    # 10 bytes are exactly 16 characters of base32.
    return base64.b32encode(hashlib.sha256(text.encode()).digest()[:10]).decode()
