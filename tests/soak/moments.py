"""Points in time, with the machine's pressure up to them."""

import os
import time
from pathlib import Path
from typing import NamedTuple


class Moment(NamedTuple):
    """One point in time; seconds."""

    at: float
    """Of the monotonic clock."""
    waited: float
    """Since the machine's start, while some task waited for a processor (Linux, accounting/psi.rst), or a
    processor for the hypervisor (proc_stat(5), steal)."""

    def pressure_since(self, earlier: "Moment") -> float:
        """Return the share of the time between that was waited."""
        return min(1.0, (self.waited - earlier.waited) / max(self.at - earlier.at, 0.001))


def now() -> Moment:
    some, *_ = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()
    processors, *_ = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    stolen = int(processors.split()[8]) / os.sysconf("SC_CLK_TCK")
    return Moment(time.monotonic(), int(some.rpartition("total=")[2]) / 1e6 + stolen)
