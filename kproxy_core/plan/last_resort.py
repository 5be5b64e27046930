"""The last resort: endpoints that all became unready at once are used for a while, instead of none.

After an outage of the API server, the controller manager marks the pods of all nodes as not ready, although
they run and answer (kubernetes #77864). kube-proxy 1.36 then refuses every connection.
"""

from collections.abc import Mapping, Set
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.model.address import Address
from kproxy_core.model.readiness import LostReadiness
from kproxy_core.model.service import EndpointSlice, ServiceName

_AT_ONCE = 5.0
"""Seconds. By default, the controller manager marks 20 pods a second, and readiness probes run every 10 s."""


class LastResort(Struct, frozen=True):
    """The endpoints of a Service in one family that are used although none is ready."""

    since: float
    """Time since when no endpoint is ready, in monotonic seconds."""
    until: float
    endpoints: frozenset[Address]


class LastResortStep(NamedTuple):
    """The change of a Service's last resort in one family between two states; None: there is none."""

    service: ServiceName
    before: LastResort | None
    after: LastResort | None
    is_over: bool
    """Its time is over, and still no endpoint is ready."""

    @property
    def begins(self) -> bool:
        before, after = self.before, self.after
        return after is not None and (before is None or before.since != after.since)


class LastResorts:
    """The last resorts of all Services of one family. Not thread-safe, but for `of`."""

    def __init__(self) -> None:
        self._of: dict[ServiceName, LastResort] = {}
        self._before: dict[ServiceName, LastResort | None] = {}
        """Those of the last `take_steps`, of the Services for which they may differ now."""

    def __len__(self) -> int:
        return len(self._of)

    def of(self, name: ServiceName) -> LastResort | None:
        """Return the last resort that a Service uses. From any thread."""
        return self._of.get(name)

    def put(self, name: ServiceName, found: LastResort | None) -> None:
        """Record the last resort of a Service; None: it has none."""
        self._before.setdefault(name, self._of.get(name))
        if found is None:
            self._of.pop(name, None)
        else:
            self._of[name] = found

    def as_planned(
        self, name: ServiceName, slices: Mapping[str, EndpointSlice] | None
    ) -> Mapping[str, EndpointSlice] | None:
        """Return the *slices* of a Service with its last resort as if it were ready."""
        resort = self._of.get(name)
        return as_ready(slices, resort.endpoints) if slices and resort else slices

    def take_steps(self, lost: Mapping[ServiceName, LostReadiness], now: float) -> list[LastResortStep]:
        """Return the changes since the last call. *lost*: see `find_last_resort`."""
        taken, self._before = self._before, {}
        return [
            LastResortStep(name, before, after, is_over=_is_over(before, after, lost.get(name), now))
            for name, before in taken.items() if before != (after := self._of.get(name))
        ]


def _is_over(
    before: LastResort | None, after: LastResort | None, lost: LostReadiness | None, now: float
) -> bool:
    return (
        after is None and before is not None and before.until <= now
        and lost is not None and lost.none_since is not None)


def find_last_resort(
    slices: Mapping[str, EndpointSlice] | None, lost: LostReadiness | None, seconds: float, now: float
) -> LastResort | None:
    """Return the last resort of a Service that has one for *seconds*; None if it may use none at *now*.

    These are the endpoints that became unready at most 5 s before the Service had no ready one any more. None
    are used while another endpoint terminates and still serves, which takes precedence (KEP-1669).
    """
    if not slices or lost is None or lost.none_since is None or now >= lost.none_since + seconds:
        return None
    endpoints = frozenset(
        address for address, at in lost.endpoints.items() if at > lost.none_since - _AT_ONCE)
    if not endpoints or any(
        endpoint.ready or (endpoint.serving and endpoint.terminating)
        for piece in slices.values() for endpoint in piece.endpoints
    ):
        return None
    return LastResort(lost.none_since, lost.none_since + seconds, endpoints)


def as_ready(slices: Mapping[str, EndpointSlice], addresses: Set[Address]) -> dict[str, EndpointSlice]:
    """Return *slices* as if their endpoints at *addresses* were ready."""
    return {name: _as_ready(piece, addresses) for name, piece in slices.items()}


def _as_ready(piece: EndpointSlice, addresses: Set[Address]) -> EndpointSlice:
    if addresses.isdisjoint([endpoint.address for endpoint in piece.endpoints]):
        return piece
    return replace(piece, endpoints=tuple([
        endpoint._replace(ready=True) if endpoint.address in addresses else endpoint
        for endpoint in piece.endpoints
    ]))  # fmt: skip
