"""Points in time, with the machine's pressure up to them."""

import time
from pathlib import Path
from typing import NamedTuple


class Moment(NamedTuple):
    """One point in time; seconds."""

    at: float
    """Of the monotonic clock."""
    waited: float
    """Since the machine's start, while some task waited for a processor (Linux, accounting/psi.rst)."""

    def pressure_since(self, earlier: "Moment") -> float:
        """Return the share of the time between in which some task waited for a processor."""
        return min(1.0, (self.waited - earlier.waited) / max(self.at - earlier.at, 0.001))


def now() -> Moment:
    some, *_ = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()
    return Moment(time.monotonic(), int(some.rpartition("total=")[2]) / 1e6)
