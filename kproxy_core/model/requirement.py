"""A requirement of a mode, as found on this machine."""

from msgspec import Struct


class Requirement(Struct, frozen=True):
    what: str
    met: bool
    found: str
    """The observation behind `met`, such as ``nft 1.0.6``."""
    remedy: str = ""
    """Advice for the operator; "" if met."""
    guessed: bool = False
    """Inferred from versions or files, not tried."""
