"""When to try again: decided here, slept elsewhere."""

from collections.abc import Callable

FIRST = 0.1
"""Seconds after the first failure."""

LONGEST = 30.0
"""Seconds that it grows to."""

LONGEST_ASKED = 300.0
"""Seconds that a server may ask for at most."""

STABLE = 5.0
"""An attempt that went well for so many seconds makes what was before it forgotten."""


class Backoff:
    """Doubles from `FIRST` to `LONGEST`, each time less up to half of it by chance.

    Chance spreads the nodes of a cluster that all lost the same API server.
    """

    __slots__ = ("_chance", "_next")

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._next = FIRST

    def delay(self, lasted: float, asked: float = 0.0) -> float:
        """Seconds to wait, now that an attempt has ended that went well for *lasted* seconds.

        *asked*: what the server asked for (Retry-After), the least that is waited.
        """
        if lasted >= STABLE:
            self._next = FIRST
        step, self._next = self._next, min(self._next * 2, LONGEST)
        return max(step - step / 2 * self._chance(), min(asked, LONGEST_ASKED))
