"""The error of all operations on the node, its kernel and its programs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class HostError(Exception):
    """The node refused an operation; ``str()`` names the operation and the reason."""

    def __init__(self, what: str, cause: OSError | None = None) -> None:
        """*what* names the operation, without a full stop; *cause* is the kernel's error, if any."""
        reason = ""
        if cause is not None:
            reason = cause.strerror or (os.strerror(cause.errno) if cause.errno else str(cause))
        super().__init__(f"{what}: {reason}" if reason else what)
        self.errno = None if cause is None else cause.errno
        """The error number; None without one from the kernel."""


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Turn an OSError into a HostError: cannot do *what*."""
    try:
        yield
    except OSError as error:
        raise HostError(f"cannot {what}", error) from error
