"""Which endpoints count: readiness, topology hints and traffic policies.

kube-proxy 1.36, pkg/proxy/topology.go; KEP-1669 (terminating endpoints),
KEP-2433 (topology hints), KEP-3015 (same-node hints).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kproxy_core.model.address import Address
from kproxy_core.model.endpoint import Destination, Endpoint
from kproxy_core.model.node import NodeView

Candidates = Sequence[tuple[Destination, Endpoint]]


@dataclass(frozen=True, slots=True)
class Usable:
    """The outcome for one service port; see the fields of ServicePlan."""

    cluster: tuple[Destination, ...] = ()
    local: tuple[Destination, ...] = ()
    hairpins: tuple[Address, ...] = ()
    any: bool = False
    ready_local: int = 0


_NONE = Usable()


def categorize(
    candidates: Candidates, node: NodeView, *, use_cluster: bool, use_local: bool
) -> Usable:
    """Choose among the endpoints of one service port.

    *use_cluster*: some traffic may go anywhere. *use_local*: some policy is Local.
    Falling back to endpoints that terminate but still serve is decided for both
    lists separately, and hints never apply to it.
    """
    if not candidates:
        return _NONE
    ready = [item for item in candidates if item[1].ready]
    fallback = [i for i in candidates if i[1].serving and i[1].terminating and not i[1].ready]
    cluster: Candidates = ()
    local: Candidates = ()
    any_usable = False
    if use_cluster:
        # Without ready endpoints the ones that terminate step in, a ready one never being among them.
        cluster = _near(ready, node) or fallback
        any_usable = bool(cluster)
    if use_local:
        any_usable = any_usable or bool(ready or fallback)
        local = _on_node(ready, node) or _on_node(fallback, node)
    reached = [*cluster, *local] if local else cluster
    return Usable(
        cluster=tuple([where for where, _ in cluster]),
        local=tuple([where for where, _ in local]),
        hairpins=tuple(dict.fromkeys(w.address for w, _ in _on_node(reached, node))),
        any=any_usable,
        ready_local=len({where.address for where, _ in _on_node(ready, node)}),
    )


def _on_node(candidates: Candidates, node: NodeView) -> list[tuple[Destination, Endpoint]]:
    return [item for item in candidates if item[1].node == node.name and node.name]


def _near(ready: list[tuple[Destination, Endpoint]], node: NodeView) -> Candidates:
    """The ready endpoints that hints leave for this node.

    Hints count only if every ready endpoint has them and one names this node, or its zone.
    """
    if not ready:
        return ready
    if all(endpoint.node_hints for _, endpoint in ready):
        near = [item for item in ready if node.name in item[1].node_hints]
        if near:
            return near
    if all(endpoint.zone_hints for _, endpoint in ready):
        near = [item for item in ready if node.zone in item[1].zone_hints]
        if near:
            return near
    return ready
