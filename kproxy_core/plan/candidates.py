"""The endpoints of one service port, merged from its EndpointSlices."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from kproxy_core.model.address import format_socket
from kproxy_core.model.endpoint import Candidate, Destination, EndpointSlice, Row
from kproxy_core.model.service import PortSpec

Candidates = Sequence[Candidate]

_TEXT = itemgetter(0)
_CANDIDATE = itemgetter(1)


def endpoints_of(port: PortSpec, slices: Mapping[str, EndpointSlice] | None) -> Candidates:
    """Return the endpoints of one service port without duplicates, in string order of ``address:port``.

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
        rows = sorted(chain.from_iterable(remembered), key=_TEXT)
    if len(set(map(_TEXT, rows))) < len(rows):
        rows = _without_duplicates(rows)
    return list(map(_CANDIDATE, rows))


def _remembered(piece: EndpointSlice, port: PortSpec) -> list[Row]:
    key = port.name, port.protocol
    rows = piece.rows.get(key)
    if rows is None:
        rows = piece.rows[key] = _rows(piece, port)
    return rows


def _rows(piece: EndpointSlice, port: PortSpec) -> list[Row]:
    """Return the endpoints of *piece* for *port*, sorted; equal addresses in the order of the slice."""
    numbers = [p.port for p in piece.ports if p.name == port.name and p.protocol is port.protocol]
    rows = [
        (format_socket(endpoint.address, number), (Destination(endpoint.address, number), endpoint))
        for number in numbers
        for endpoint in piece.endpoints
    ]
    rows.sort(key=_TEXT)
    return rows


def _without_duplicates(rows: Iterable[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        text, (_, endpoint) = row
        if not (endpoint.terminating and text in found):
            found[text] = row
    return list(found.values())
