"""Verdicts about endpoints from the results of their checks, and which endpoints are left out. Pure."""

from collections.abc import Collection, Mapping

from msgspec import Struct

from kproxy_core.model.service import Destination

_NEEDED = 2
"""Results in a row that change a verdict."""
_SOONER = 4
"""A result that contradicts the verdict is followed by the next check in this part of the interval."""
_PATIENCE = 1.0
"""Upper bound in seconds for the answer to a check."""


class Verdict(Struct, frozen=True, gc=False):
    """The verdict about one endpoint. Before its first check, it is taken to work."""

    fails: bool = False
    is_first: bool = True
    """There was no check yet, so the first result is believed."""
    doubts: int = 0
    """Results in a row that contradict it."""

    def after(self, *, success: bool) -> "Verdict":
        """Return the verdict after one more result."""
        if success is not self.fails:
            return Verdict(self.fails, is_first=False)
        if self.is_first or self.doubts + 1 == _NEEDED:
            return Verdict(not self.fails, is_first=False)
        return Verdict(self.fails, is_first=False, doubts=self.doubts + 1)

    def next_in(self, every: float) -> float:
        """Return the seconds from the start of the last check to that of the next one."""
        return every / _SOONER if self.doubts else every


def patience(every: float) -> float:
    """Return the seconds within which an endpoint that is checked so often must answer."""
    return min(every, _PATIENCE)


def left_out(weights: Mapping[Destination, int | None], failing: Collection[Destination]) -> set[Destination]:
    """Return the endpoints to leave out, of those of one Service in one family.

    *failing*: in the order in which they began to fail. All of them are left out if another endpoint has a
    weight; if none has, the one that failed last is kept, because a check may be wrong about all of them.
    """
    out = [where for where in failing if where in weights]
    if not any(weight != 0 and where not in out for where, weight in weights.items()):
        kept = next((where for where in reversed(out) if weights[where] != 0), None)
        return {where for where in out if where != kept}
    return set(out)
