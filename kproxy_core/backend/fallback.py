"""That another mode serves than the one that was asked for, and why."""

from typing import NamedTuple


class Fallback(NamedTuple):
    """Both modes by name."""

    wanted: str
    serving: str
    because: str
    """What the machine lacks for the one that was wanted; one line."""

    def __str__(self) -> str:
        return f"mode {self.wanted} does not work here, {self.serving} serves: {self.because}"
