"""The slowness of this machine relative to a quiet one. Every deadline of a test is multiplied by it."""

import functools
import os
import subprocess
import sys
import time

PATIENCE = "KPROXY_TEST_PATIENCE"
"""Environment variable that sets the factor instead of measuring it."""

_REFERENCE = 0.02
"""Seconds that `_sample` takes on a quiet machine with two processors."""
_SAMPLES = 5
_HIGHEST = 40.0


@functools.cache
def patience() -> float:
    """Return the factor, at least 1. It is measured once in a process, or taken from `PATIENCE`.

    The slowest of a few samples counts: a machine that is busy now will be busy again.
    """
    if text := os.environ.get(PATIENCE):
        return max(1.0, float(text))
    slowest = max(_sample() for _ in range(_SAMPLES))
    return min(_HIGHEST, max(1.0, slowest / _REFERENCE))


def _sample() -> float:
    """Return how long it takes to start an interpreter that computes a little."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-S", "-E", "-c", "sum(range(300_000))"], check=True)
    return time.monotonic() - began
