"""Growing delays between attempts that fail."""

from collections.abc import Callable

_FIRST = 0.1
"""Seconds after the first failure."""

LONGEST = 30.0
"""Upper bound of a delay in seconds, by default."""

ANSWERED = 1.0
"""Upper bound in seconds once an unreachable server answers again, even with an error: it may be starting."""

LONGEST_ASKED = 300.0
"""Upper bound in seconds for a delay that a server asks for."""

STABLE = 5.0
"""An attempt that worked for this many seconds resets the delay."""


class Backoff:
    """A delay that doubles from 0.1 to *longest* seconds.

    *chance*, uniform in [0, 1), shortens each delay by up to a half, so that the nodes of a cluster do not
    all return to the API server at once.
    """

    __slots__ = ("_chance", "_longest", "_next")

    def __init__(self, chance: Callable[[], float] = lambda: 0.0, *, longest: float = LONGEST) -> None:
        self._chance = chance
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        self._next = min(_FIRST, self._longest)

    def hasten(self) -> None:
        """Cap the next delay: the server answers again, if only with an error."""
        self._next = min(self._next, ANSWERED)

    def delay(self, lasted: float = 0.0, asked: float = 0.0) -> float:
        """Return the seconds to wait before the next attempt, after one that worked for *lasted* seconds.

        *asked* is the server's own Retry-After, a lower bound.
        """
        if lasted >= STABLE:
            self.reset()
        step, self._next = self._next, min(self._next * 2, self._longest)
        return max(step - step / 2 * self._chance(), min(asked, LONGEST_ASKED))
