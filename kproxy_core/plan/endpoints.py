"""Endpoints of a service port: merged from its EndpointSlices, and chosen by readiness, hints and
policies.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.model.address import Address, Protocol
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Candidate, Destination, EndpointSlice, PortSpec, Row
from kproxy_core.plan.quarantine import Quarantined, Sentence, without_quarantined

Candidates = Sequence[Candidate]

MOST_DESTINATIONS = 100_000
"""Limit for the endpoints times ports of one Service in one family, far above any real one."""

_FEW = 4
"""Number of ports of a slice that are looked at one by one, without a table of them."""

_KEY = _DESTINATION = itemgetter(0)
_new = tuple.__new__  # half the time of a NamedTuple's constructor, which is a Python function


def count_destinations(slices: Mapping[str, EndpointSlice] | None) -> int:
    """Return the endpoints times ports of a Service's EndpointSlices."""
    return sum(len(piece.endpoints) * len(piece.ports) for piece in slices.values()) if slices else 0


def within_limit(
    slices: Mapping[str, EndpointSlice], most: int, node_name: str = ""
) -> dict[str, EndpointSlice]:
    """Return *slices* with at most *most* endpoints times ports: of each the same number, or all that it has.

    Endpoints on this node come first, then ready ones. At least one endpoint is kept.
    """
    share = _equal_share(sorted((len(piece.endpoints), len(piece.ports)) for piece in slices.values()), most)
    kept: dict[str, EndpointSlice] = {}
    room = most
    for name, piece in sorted(slices.items()):
        number = share
        if not share and piece.ports and piece.endpoints:
            # So many slices that not each can have an endpoint.
            number = 1 if room == most or room >= len(piece.ports) else 0
            room -= number * len(piece.ports)
        kept[name] = piece if not piece.ports else _first_endpoints(piece, number, node_name)
    return kept


def _equal_share(sizes: Sequence[tuple[int, int]], most: int) -> int:
    """Return the most endpoints that each slice can have. *sizes*: their endpoints and ports, sorted."""
    ports = sum(each for _, each in sizes)
    for endpoints, of_slice in sizes:
        if endpoints * ports > most:
            return most // ports
        most -= endpoints * of_slice
        ports -= of_slice
    return sizes[-1][0] if sizes else 0


def _first_endpoints(piece: EndpointSlice, number: int, node_name: str) -> EndpointSlice:
    if number >= len(piece.endpoints):
        return piece
    known = piece.parts.get((number, node_name))
    if known is None:
        best = sorted(piece.endpoints, key=lambda each: (
            not node_name or each.node != node_name, not each.ready))
        known = replace(piece, endpoints=tuple(best[:number]))
        piece.parts.clear()
        piece.parts[number, node_name] = known
    return known


def slices_by_port(
    slices: Mapping[str, EndpointSlice]
) -> dict[tuple[str, Protocol], dict[str, EndpointSlice]]:
    """Return the *slices* that have endpoints for a service port, by its name and protocol.

    A Service of many ports is planned from this: its ports times its slices are too many to look at.
    """
    found: dict[tuple[str, Protocol], dict[str, EndpointSlice]] = {}
    for name, piece in slices.items():
        for port, protocol, _ in piece.ports if piece.endpoints else ():
            found.setdefault((port, protocol), {})[name] = piece
    return found


def endpoints_of(port: PortSpec, slices: Mapping[str, EndpointSlice] | None) -> Candidates:
    """Return the endpoints of one service port without duplicates, in the order of their addresses and ports.

    Of two entries with the same address and port, one that is not terminating wins,
    then the later slice by name (undefined in kube-proxy).

    If a Service has several slices, each caches its sorted rows: a changed slice costs its own endpoints, and
    the others only a merge of sorted lists.
    """
    if not slices:
        return ()
    if len(slices) == 1:
        (piece,) = slices.values()
        rows = _rows(piece, port)
    else:
        remembered = (_remembered(slices[name], port) for name in sorted(slices))
        rows = sorted(chain.from_iterable(remembered), key=_KEY)
    found = dict(rows)
    if len(found) < len(rows):
        found = _without_duplicates(rows)
    return list(found.values())


def rows_by_slice(
    port: PortSpec, slices: Mapping[str, EndpointSlice]
) -> Iterator[tuple[EndpointSlice, list[Row]]]:
    """Yield the slices by name, each with its endpoints for *port*."""
    for _, piece in sorted(slices.items()):
        yield piece, _remembered(piece, port)


def _remembered(piece: EndpointSlice, port: PortSpec) -> list[Row]:
    key = port.name, port.protocol
    rows = piece.rows.get(key)
    if rows is None:
        rows = piece.rows[key] = _rows(piece, port)
    return rows


def _rows(piece: EndpointSlice, port: PortSpec) -> list[Row]:
    """Return the endpoints of *piece* for *port*, sorted; equal addresses in the order of the slice."""
    if len(piece.ports) > _FEW:
        numbers: Sequence[int] = piece.numbers.get((port.name, port.protocol), ())
    else:
        numbers = [p.port for p in piece.ports if p.name == port.name and p.protocol is port.protocol]
    rows = []
    for number in numbers:
        packed = number.to_bytes(2, "big")
        # This takes half the time of Destination(...), whose constructor is a Python function.
        rows += [
            ((address := endpoint.address) + packed, (_new(Destination, (address, number)), endpoint))
            for endpoint in piece.endpoints
        ]
    rows.sort(key=_KEY)
    return rows


def _without_duplicates(rows: Iterable[Row]) -> dict[bytes, Candidate]:
    found: dict[bytes, Candidate] = {}
    for key, candidate in rows:
        if not (candidate[1].terminating and key in found):
            found[key] = candidate
    return found


# The choice of usable endpoints: kube-proxy 1.36, pkg/proxy/topology.go; KEP-1669 (terminating endpoints),
# KEP-2433 (topology hints), KEP-3015 (same-node hints).

class Usable(Struct, frozen=True, gc=False):
    """The usable endpoints of one service port; see the fields of ServicePlan."""

    cluster: tuple[Destination, ...] = ()
    local: tuple[Destination, ...] = ()
    hairpins: tuple[Address, ...] = ()
    quarantined: tuple[tuple[Destination, Sentence], ...] = ()
    any: bool = False


_NONE = Usable()


def categorize(
    candidates: Candidates, node: NodeView, *, use_cluster: bool, use_local: bool,
    quarantined: Quarantined | None = None,
) -> Usable:
    """Choose the usable endpoints of one service port.

    *use_cluster*: some traffic may use endpoints on any node. *use_local*: some policy is
    Local. The fallback to terminating endpoints that still serve is decided for each of
    the two lists separately, and hints never apply to it. Then each list loses at most half of
    its endpoints to quarantine.
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
    left_out: tuple[tuple[Destination, Sentence], ...] = ()
    if quarantined:
        both = dict.fromkeys(map(_DESTINATION, chain(cluster, local)))
        cluster, local = (without_quarantined(chosen, quarantined) for chosen in (cluster, local))
        kept = frozenset(map(_DESTINATION, chain(cluster, local)))
        left_out = tuple([(where, quarantined[where]) for where in both if where not in kept])
    hairpins = on_node([*cluster, *local] if local else cluster, node)
    return Usable(
        tuple(map(_DESTINATION, cluster)),
        tuple(map(_DESTINATION, local)),
        tuple(dict.fromkeys([where.address for where, _ in hairpins])) if hairpins else (),
        left_out,
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
