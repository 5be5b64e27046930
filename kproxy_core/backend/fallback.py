"""The record that another mode serves than the requested one."""

from typing import NamedTuple


class Fallback(NamedTuple):
    """A replacement of one mode by another, both by name."""

    wanted: str
    serving: str
    because: str
    """The reason why the wanted mode does not work on this machine, in one line."""

    def __str__(self) -> str:
        return f"mode {self.wanted} does not work here, {self.serving} serves: {self.because}"
