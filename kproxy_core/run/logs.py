"""Structured logging: one line per event, to standard error.

Rooms log with ``logging.getLogger("kproxy.<room>")`` and put values into
``extra={"fields": {...}}``. Verbosity as Kubernetes counts it: 0 shows INFO and above, 2 DEBUG
as well, and n > 2 what is logged at level ``12 - n``.
"""

from typing import TextIO


def set_up(verbosity: int, form: str, stream: TextIO | None = None) -> None:
    """Send all of kproxy's logs to *stream* (standard error) as ``text`` or ``json``."""
    raise NotImplementedError
