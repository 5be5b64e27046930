"""How long tests wait for what must happen."""

PATIENCE = 120.0
"""Seconds, for what takes less than one on a quiet machine: what has not come by then never will."""
