"""Nodes and ServiceCIDRs: from the wire to the model."""

from kproxy_core.model.address import Address, Cidr
from kproxy_core.model.node import NodeObject
from kproxy_core.objects import reading, wire
from kproxy_core.store.events import NodeSet, ServiceCidrSet

DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"
"""Set by the cluster autoscaler before it removes the node: load balancers should avoid it (KEP-3836)."""


def read_node(obj: wire.Node) -> reading.Reading[NodeSet]:
    """Read any Node; the source selects this node's own."""
    meta = obj.metadata or wire.NodeMeta()
    spec = obj.spec or wire.NodeSpec()
    found = reading.Findings()
    try:
        name = reading.checked_subdomain(meta.name, "metadata.name")
    except reading.Refused as refused:
        return reading.Reading(None, None, reading.Findings([refused]).bad("Node", None, meta.name))
    node = NodeObject(
        name,
        zone=(meta.labels and meta.labels.zone) or "",
        addresses=_addresses(obj.status, found),
        pod_cidrs=_pod_cidrs(spec, found),
        eligible=not meta.deletion_timestamp
        and all(taint.key != DELETION_TAINT for taint in spec.taints or ()),
    )
    return reading.Reading(("", name), NodeSet(node), found.bad("Node", None, name))


def _pod_cidrs(spec: wire.NodeSpec, found: reading.Findings) -> tuple[Cidr, ...]:
    if spec.pod_cidrs:
        return read_cidrs("spec.podCIDRs[{}]", spec.pod_cidrs, found)
    return read_cidrs("spec.podCIDR", [spec.pod_cidr], found) if spec.pod_cidr else ()


def _addresses(status: wire.NodeStatus | None, found: reading.Findings) -> tuple[Address, ...]:
    """Return the InternalIPs, then the ExternalIPs."""
    kept: dict[Address, None] = {}
    entries = list(enumerate(status.addresses or ())) if status is not None else []
    for kind in ("InternalIP", "ExternalIP"):
        for i, entry in entries:
            if entry.type == kind:
                try:
                    kept[reading.checked_address(entry.address, "status.addresses[{}].address", i)] = None
                except reading.Refused as refused:
                    found.append(refused)
    return tuple(kept)


def read_service_cidr(obj: wire.ServiceCIDR) -> reading.Reading[ServiceCidrSet]:
    name = obj.metadata.name if obj.metadata else None
    found = reading.Findings()
    try:
        key = ("", reading.checked_subdomain(name, "metadata.name"))
    except reading.Refused as refused:
        return reading.Reading(None, None, reading.Findings([refused]).bad("ServiceCIDR", None, name))
    cidrs = read_cidrs("spec.cidrs[{}]", (obj.spec.cidrs if obj.spec else None) or [], found)
    return reading.Reading(key, ServiceCidrSet(key[1], cidrs), found.bad("ServiceCIDR", None, name))


def read_cidrs(path: str, texts: list[str | None], found: reading.Findings) -> tuple[Cidr, ...]:
    """Return the valid networks among *texts*, each once."""
    kept: dict[Cidr, None] = {}
    for i, text in enumerate(texts):
        try:
            kept[reading.checked_cidr(text, path, i)] = None
        except reading.Refused as refused:
            found.append(refused)
    return tuple(kept)
