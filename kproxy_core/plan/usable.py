"""The choice of usable endpoints by readiness, topology hints and traffic policies.

kube-proxy 1.36, pkg/proxy/topology.go; KEP-1669 (terminating endpoints),
KEP-2433 (topology hints), KEP-3015 (same-node hints).
"""

from operator import itemgetter

from msgspec import Struct

from kproxy_core.model.address import Address
from kproxy_core.model.endpoint import Candidate, Destination
from kproxy_core.model.node import NodeView
from kproxy_core.plan.candidates import Candidates


class Usable(Struct, frozen=True, gc=False):
    """The result for one service port; see the fields of ServicePlan."""

    cluster: tuple[Destination, ...] = ()
    local: tuple[Destination, ...] = ()
    hairpins: tuple[Address, ...] = ()
    any: bool = False


_NONE = Usable()
_DESTINATION = itemgetter(0)


def categorize(candidates: Candidates, node: NodeView, *, use_cluster: bool, use_local: bool) -> Usable:
    """Choose the usable endpoints of one service port.

    *use_cluster*: some traffic may use endpoints on any node. *use_local*: some policy is
    Local. The fallback to terminating endpoints that still serve is decided for each of
    the two lists separately, and hints never apply to it.
    """
    if not candidates:
        return _NONE
    ready = [item for item in candidates if item[1].ready]
    fallback: Candidates = ()
    if len(ready) < len(candidates):
        fallback = [i for i in candidates if i[1].serving and i[1].terminating and not i[1].ready]
    cluster: Candidates = ()
    local: Candidates = ()
    any_usable = False
    if use_cluster:
        # Terminating endpoints replace missing ready ones; none of them is ready itself.
        cluster = _near(ready, node) or fallback
        any_usable = bool(cluster)
    if use_local:
        any_usable = any_usable or bool(ready or fallback)
        local = on_node(ready, node) or on_node(fallback, node)
    hairpins = on_node([*cluster, *local] if local else cluster, node)
    return Usable(
        tuple(map(_DESTINATION, cluster)),
        tuple(map(_DESTINATION, local)),
        tuple(dict.fromkeys([where.address for where, _ in hairpins])) if hairpins else (),
        any_usable,
    )


def on_node(candidates: Candidates, node: NodeView) -> Candidates:
    """Return the *candidates* on *node*; none if its name is unknown."""
    name = node.name
    return [item for item in candidates if item[1].node == name] if name else ()


def _near(ready: list[Candidate], node: NodeView) -> Candidates:
    """Return the ready endpoints that hints assign to this node.

    Hints count only if every ready endpoint has them and one names this node, or its zone.
    """
    if not ready:
        return ready
    first = ready[0][1]  # usually has no hints, so that no other endpoint needs to be checked
    if first.node_hints and all(endpoint.node_hints for _, endpoint in ready):
        near = [item for item in ready if node.name in item[1].node_hints]
        if near:
            return near
    if first.zone_hints and all(endpoint.zone_hints for _, endpoint in ready):
        near = [item for item in ready if node.zone in item[1].zone_hints]
        if near:
            return near
    return ready
