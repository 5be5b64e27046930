"""The endpoints of one service port, merged from its EndpointSlices."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from kproxy_core.model.endpoint import Candidate, Destination, EndpointSlice, Row
from kproxy_core.model.service import PortSpec

Candidates = Sequence[Candidate]

MOST_DESTINATIONS = 100_000
"""Limit for the endpoints times ports of one Service in one family, far above any real one."""

_KEY = itemgetter(0)
_new = tuple.__new__


def count_destinations(slices: Mapping[str, EndpointSlice] | None) -> int:
    """Return the endpoints times ports of a Service's EndpointSlices."""
    return sum(len(piece.endpoints) * len(piece.ports) for piece in slices.values()) if slices else 0


def within_limit(slices: Mapping[str, EndpointSlice]) -> dict[str, EndpointSlice]:
    """Return the first *slices* by name that together hold at most `MOST_DESTINATIONS`."""
    kept: dict[str, EndpointSlice] = {}
    room = MOST_DESTINATIONS
    for name, piece in sorted(slices.items()):
        room -= len(piece.endpoints) * len(piece.ports)
        if room < 0:
            break
        kept[name] = piece
    return kept


def endpoints_of(port: PortSpec, slices: Mapping[str, EndpointSlice] | None) -> Candidates:
    """Return the endpoints of one service port without duplicates, in the order of their addresses and ports.

    Of two entries with the same address and port, one that is not terminating wins,
    then the later slice by name (undefined in kube-proxy).

    Where a Service has several slices, each remembers its rows: one that changes costs what it holds, and the
    others only a merge of sorted lists.
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


def _remembered(piece: EndpointSlice, port: PortSpec) -> list[Row]:
    key = port.name, port.protocol
    rows = piece.rows.get(key)
    if rows is None:
        rows = piece.rows[key] = _rows(piece, port)
    return rows


def _rows(piece: EndpointSlice, port: PortSpec) -> list[Row]:
    """Return the endpoints of *piece* for *port*, sorted; equal addresses in the order of the slice."""
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
