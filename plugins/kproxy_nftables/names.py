"""Names of all our objects in nf_tables, and the templates that some of them stand for.

A template chain is the constant rule set for one traffic policy and one number of endpoints. Its name
encodes all of its parameters, so names and templates convert into each other.
"""

import base64
import hashlib
import re
from functools import cache
from typing import NamedTuple

from kproxy_core.contract import HashBy, Protocol, ServicePortKey
from kproxy_core.nft.rules import NF_DROP, NFT_GOTO, Verdict

TABLE = "kproxy"

# Verdict maps: frontend -> chain. README.md describes the elements of each.
VIPS = "vips"
ADMITTED_VIPS = "admitted-vips"
STICKY_VIPS = "sticky-vips"
STICKY_LOCAL_VIPS = "sticky-local-vips"
RECORDED_VIPS = "recorded-vips"
NODE_PORTS = "nodeports"
STICKY_NODE_PORTS = "sticky-nodeports"
STICKY_LOCAL_NODE_PORTS = "sticky-local-nodeports"
RECORDED_NODE_PORTS = "recorded-nodeports"
# Data maps: frontend and index -> endpoint. There is one of each for every protocol, because nft 1.0.6 knows
# the type of a port only together with its protocol.
VIP_ENDPOINTS = {p: f"{p.name.lower()}-vip-endpoints" for p in Protocol}
VIP_LOCAL_ENDPOINTS = {p: f"{p.name.lower()}-vip-local-endpoints" for p in Protocol}
NODE_PORT_ENDPOINTS = {p: f"{p.name.lower()}-nodeport-endpoints" for p in Protocol}
NODE_PORT_LOCAL_ENDPOINTS = {p: f"{p.name.lower()}-nodeport-local-endpoints" for p in Protocol}


class FrontendMaps(NamedTuple):
    """The maps of one kind of frontend, apart from its verdict maps."""

    endpoints: dict[Protocol, str]
    local_endpoints: dict[Protocol, str]
    sticky: str
    sticky_local: str
    """For traffic from outside the cluster, with external policy Local."""
    recorded: str


VIP_MAPS = FrontendMaps(
    VIP_ENDPOINTS, VIP_LOCAL_ENDPOINTS, STICKY_VIPS, STICKY_LOCAL_VIPS, RECORDED_VIPS)
NODE_PORT_MAPS = FrontendMaps(
    NODE_PORT_ENDPOINTS, NODE_PORT_LOCAL_ENDPOINTS,
    STICKY_NODE_PORTS, STICKY_LOCAL_NODE_PORTS, RECORDED_NODE_PORTS,
)  # fmt: skip

# Sets. Rules fill the last two: while traffic is counted, and while node ports are relayed on loopback.
CLUSTER_IPS = "cluster-ips"
NODE_IPS = "node-ips"
HAIRPINS = "hairpins"
SERVICE_CIDRS = "service-cidrs"
REFUSED = "refused"
NOT_RELAYED = "not-relayed"

FLOWTABLE = "flows"
OFFLOADING = "flow-offload"

VERDICT_MAPS = (
    VIPS, ADMITTED_VIPS, STICKY_VIPS, STICKY_LOCAL_VIPS, RECORDED_VIPS,
    NODE_PORTS, STICKY_NODE_PORTS, STICKY_LOCAL_NODE_PORTS, RECORDED_NODE_PORTS,
)  # fmt: skip
ELEMENT_CONTAINERS = (
    *VERDICT_MAPS,
    *VIP_ENDPOINTS.values(), *VIP_LOCAL_ENDPOINTS.values(),
    *NODE_PORT_ENDPOINTS.values(), *NODE_PORT_LOCAL_ENDPOINTS.values(),
    CLUSTER_IPS, NODE_IPS, HAIRPINS,
)  # fmt: skip
"""Containers whose elements are compared and written one by one."""

RANKS = {CLUSTER_IPS: 2} | dict.fromkeys(VERDICT_MAPS, 1)
"""Containers whose elements must not exist before those of containers of a lower rank, 0 by default."""

REJECT = "reject-traffic"
ADMITTED = "admitted"

# Verdicts, as values of verdict maps.
GOTO_REJECT = Verdict(NFT_GOTO, REJECT)
DROP = Verdict(NF_DROP)

_TEMPLATE = re.compile(
    r"(tcp|udp|sctp)-(nodeport-)?(cluster|local|external|external-local|short-circuit)-(\d+)(?:-(\d+))?(-sticky)?"
    r"(?:-by-(client|flow))?"
)


_HASHES: dict[str | None, HashBy] = {None: "", "client": "client", "flow": "flow"}


class Template(NamedTuple):
    protocol: Protocol
    policy: str
    """``cluster``: ClusterIP. ``local``: ClusterIP, internal policy Local. ``external``: other
    frontends. ``external-local``: those with external policy Local. ``short-circuit``: this
    node's pods on the way to those."""
    cluster: int
    """Number of slots of cluster-wide endpoints; 0 if the template does not use them."""
    local: int
    """Number of slots of endpoints on this node; 0 if the template does not use them."""
    sticky: bool
    """With ClientIP session affinity."""
    node_port: bool
    hash_by: HashBy = ""

    @property
    def name(self) -> str:
        prefix = f"{self.protocol.name.lower()}-{'nodeport-' if self.node_port else ''}"
        both = self.policy == "external-local"
        count = f"{self.cluster}-{self.local}" if both else self.local or self.cluster
        suffix = f"{'-sticky' if self.sticky else ''}{f'-by-{self.hash_by}' if self.hash_by else ''}"
        return f"{prefix}{self.policy}-{count}{suffix}"


def parse_template(chain: str) -> Template | None:
    """Return the template that a *chain*'s name encodes; None for other chains."""
    match = _TEMPLATE.fullmatch(chain)
    if match is None:
        return None
    name, node_port, policy, first, second, sticky, hash_by = match.groups()
    cluster, local = (0, int(first)) if policy == "local" else (int(first), int(second or 0))
    return Template(Protocol[name.upper()], policy, cluster, local, bool(sticky), bool(node_port),
                    _HASHES[hash_by])


@cache
def goto_template(
    protocol: Protocol, policy: str, cluster: int, local: int, sticky: bool, node_port: bool,
    hash_by: HashBy = "",
) -> Verdict:
    return Verdict(NFT_GOTO, Template(protocol, policy, cluster, local, sticky, node_port, hash_by).name)


_LEFT = re.compile(r"(affinity|endpoints|pin|ranges|record)-.*|record|filter-(input|postrouting)")


def may_be_left(name: str) -> bool:
    """Return whether an object that is not wanted may be ours, of Services that have changed."""
    return parse_template(name) is not None or _LEFT.fullmatch(name) is not None


def owned_name(key: ServicePortKey) -> str:
    """Return the common part of the names of a service port's objects: a hash and a readable key."""
    readable = f"{key.namespace}/{key.name}/{key.protocol.name.lower()}/{key.port_name}"
    digest = base64.b32encode(hashlib.sha256(readable.encode()).digest())[:8].decode()
    return f"{digest}-{readable}"[:200]
