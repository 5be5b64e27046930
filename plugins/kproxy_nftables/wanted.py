"""The elements of maps and sets for a service plan. Pure.

Keys and data have the kernel's format: each field padded to 4 bytes, addresses and ports big-endian, the
index in host order.
"""

import struct
from collections.abc import Iterable, Iterator

from kproxy_core.contract import Address, Destination, NodeView, Protocol, ServicePlan
from kproxy_core.nft.elements import PlainElement
from kproxy_core.nft.rules import NFT_GOTO, NFT_JUMP, Verdict
from kproxy_nftables import names

Slot = tuple[int, Destination]
"""An endpoint with its index, or one of its indices."""

_PORT_KEY = struct.Struct(">B3xH2x")
_PROTOCOLS = {protocol.value: protocol for protocol in Protocol}
_PORT = struct.Struct(">H2x")
_INDEX = struct.Struct("=I")
_INDEXES = [_INDEX.pack(i) for i in range(256)]


def vip_key(address: Address, protocol: Protocol, port: int) -> bytes:
    """Return the key of a frontend with an address: ``daddr . l4proto . dport``."""
    return address + _PORT_KEY.pack(protocol, port)


def port_key(protocol: Protocol, port: int) -> bytes:
    """Return the key of a node port: ``l4proto . dport``."""
    return _PORT_KEY.pack(protocol, port)


def parse_port_key(key: bytes) -> tuple[Protocol, int] | None:
    """Return protocol and port; None for a key that only another process may have added."""
    if len(key) != _PORT_KEY.size:
        return None
    protocol, port = _PORT_KEY.unpack(key)
    return (_PROTOCOLS[protocol], port) if protocol in _PROTOCOLS else None


def endpoint_key(address: bytes, port: int) -> bytes:
    """Return the key of a frontend in an endpoint map, without the index: ``[daddr .] dport``."""
    return address + _PORT.pack(port)


def parse_destination(value: bytes) -> Destination:
    """Return the endpoint in the data of an element: ``address . port``."""
    return Destination(Address(value[:-4]), _PORT.unpack(value[-4:])[0])


def shared_elements(plan: ServicePlan) -> list[PlainElement]:
    """Return the elements that several service ports may share; `Applied` counts their owners."""
    wanted: list[PlainElement] = []
    if plan.cluster_ip is not None:
        wanted.append((names.CLUSTER_IPS, plan.cluster_ip, None))
    wanted += [(names.HAIRPINS, address + address, None) for address in plan.hairpins]
    return wanted


def elements(plan: ServicePlan, cluster: Iterable[Slot], local: Iterable[Slot]) -> list[PlainElement]:
    """Return the elements that belong to this service port alone.

    *cluster* and *local* are the plan's slots with their indices: all, or those to write. The data of an
    endpoint is ``address . port``.
    """
    wanted: list[PlainElement] = []
    protocol = plan.key.protocol
    pack = _PORT.pack
    cluster_values = [(index(at), address + pack(port)) for at, (address, port) in cluster]
    local_values = [(index(at), address + pack(port)) for at, (address, port) in local]
    if plan.cluster_ip is not None:
        key = vip_key(plan.cluster_ip, protocol, plan.port)
        frontend = endpoint_key(plan.cluster_ip, plan.port)
        verdict = internal_verdict(plan)
        wanted.append((names.VIPS, key, verdict))
        if plan.internal_policy_local:
            _endpoints(wanted, names.VIP_LOCAL_ENDPOINTS[protocol], frontend, local_values)
        else:
            _endpoints(wanted, names.VIP_ENDPOINTS[protocol], frontend, cluster_values)
        if plan.affinity_seconds:
            _affinity(wanted, names.VIP_MAPS, key, plan, local=plan.internal_policy_local)

    external = plan.external_addresses
    if external:
        verdict = external_verdict(plan, node_port=False)
        for address in external:
            key = vip_key(address, protocol, plan.port)
            frontend = endpoint_key(address, plan.port)
            if plan.source_ranges and address in plan.load_balancer_ips:
                wanted.append((names.VIPS, key, Verdict(NFT_GOTO, ranges_chain(plan))))
                wanted.append((names.ADMITTED_VIPS, key, verdict))
            else:
                wanted.append((names.VIPS, key, verdict))
            _endpoints(wanted, names.VIP_ENDPOINTS[protocol], frontend, cluster_values)
            if plan.external_policy_local:
                _endpoints(wanted, names.VIP_LOCAL_ENDPOINTS[protocol], frontend, local_values)
            if plan.affinity_seconds:
                _affinity(wanted, names.VIP_MAPS, key, plan)

    if plan.node_port:
        key = port_key(protocol, plan.node_port)
        frontend = endpoint_key(b"", plan.node_port)
        wanted.append((names.NODE_PORTS, key, external_verdict(plan, node_port=True)))
        _endpoints(wanted, names.NODE_PORT_ENDPOINTS[protocol], frontend, cluster_values)
        if plan.external_policy_local:
            _endpoints(wanted, names.NODE_PORT_LOCAL_ENDPOINTS[protocol], frontend, local_values)
        if plan.affinity_seconds:
            _affinity(wanted, names.NODE_PORT_MAPS, key, plan)
    return wanted


def node_elements(node: NodeView) -> list[PlainElement]:
    return [(names.NODE_IPS, address, None) for address in node.node_port_addresses]


def index(at: int) -> bytes:
    """Return the last field of an endpoint's key."""
    return _INDEXES[at] if at < len(_INDEXES) else _INDEX.pack(at)


def _endpoints(
    wanted: list[PlainElement], container: str, key: bytes, values: list[tuple[bytes, bytes]]
) -> None:
    wanted += [(container, key + at, value) for at, value in values]


def _affinity(
    wanted: list[PlainElement], maps: names.FrontendMaps, key: bytes, plan: ServicePlan, *,
    local: bool = False,
) -> None:
    """Add the elements that pin and record clients of the frontend *key*.

    With *local*, all clients use endpoints on this node.
    """
    cluster_group, local_group = affinity_groups(plan)
    group = local_group if local else cluster_group
    if group:
        wanted.append((maps.sticky, key, Verdict(NFT_JUMP, f"pin-{group}")))
    if plan.external_policy_local and not local and local_group:
        wanted.append((maps.sticky_local, key, Verdict(NFT_JUMP, f"pin-{local_group}")))
    if cluster_group or local_group:
        wanted.append((maps.recorded, key, Verdict(NFT_GOTO, record_chain(plan))))


def verdicts(plan: ServicePlan) -> Iterator[Verdict]:
    """Yield every verdict among the elements of *plan* that may lead to a template chain."""
    if plan.cluster_ip is not None:
        yield internal_verdict(plan)
    if plan.external_addresses:
        yield external_verdict(plan, node_port=False)
    if plan.node_port:
        yield external_verdict(plan, node_port=True)


def internal_verdict(plan: ServicePlan) -> Verdict:
    if not plan.has_endpoints:
        return names.GOTO_REJECT
    if not plan.has_internal_endpoints:
        return names.DROP
    protocol, sticky = plan.key.protocol, plan.affinity_seconds > 0
    if plan.internal_policy_local:
        return names.goto_template(protocol, "local", 0, len(plan.local_slots), sticky, False, plan.hash_by)
    return names.goto_template(protocol, "cluster", len(plan.cluster_slots), 0, sticky, False, plan.hash_by)


def external_verdict(plan: ServicePlan, *, node_port: bool) -> Verdict:
    """Return the verdict for traffic to the other frontends that source ranges have admitted.

    With external policy Local and no endpoint on this node, the template drops traffic from outside only:
    pods and the node itself take the short circuit.
    """
    if not plan.has_endpoints:
        return names.GOTO_REJECT
    protocol, sticky = plan.key.protocol, plan.affinity_seconds > 0
    if plan.external_policy_local:
        return names.goto_template(
            protocol, "external-local", len(plan.cluster_slots), len(plan.local_slots), sticky, node_port,
            plan.hash_by,
        )  # fmt: skip
    return names.goto_template(
        protocol, "external", len(plan.cluster_slots), 0, sticky, node_port, plan.hash_by)


def affinity_groups(plan: ServicePlan) -> tuple[str, str]:
    """Return the names of the affinity groups of cluster-wide endpoints and of those on this node.

    "" means that there are no such endpoints. The groups are separate because a frontend must not send a
    client to an endpoint that it may not use, even if another frontend pinned the client there: a Local
    frontend never leads to another node.
    """
    if not plan.affinity_seconds:
        return "", ""
    base = names.owned_name(plan.key)
    if not (plan.internal_policy_local or plan.external_policy_local):
        return (base if plan.cluster else ""), ""
    return (f"{base}/cluster" if plan.cluster else ""), (f"{base}/local" if plan.local else "")


def record_chain(plan: ServicePlan) -> str:
    return f"record-{names.owned_name(plan.key)}"


def ranges_chain(plan: ServicePlan) -> str:
    return f"ranges-{names.owned_name(plan.key)}"
