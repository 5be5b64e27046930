"""The error of all operations on the node, its kernel and its programs."""

import os


class HostError(Exception):
    """The node refused an operation; ``str()`` names the operation and the reason."""

    def __init__(self, what: str, cause: OSError | None = None) -> None:
        """*what* names the operation, without a full stop; *cause* is the kernel's error, if any."""
        reason = "" if cause is None else os.strerror(cause.errno) if cause.errno else str(cause)
        super().__init__(f"{what}: {reason}" if reason else what)
        self.what = what
        self.errno = None if cause is None else cause.errno
        """The error number; None without one from the kernel."""
