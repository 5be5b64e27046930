"""What goes wrong between kproxy and the node, its kernel or its programs, in one type."""

import os


class HostError(Exception):
    """The node refused something; ``str()`` says what, and why."""

    def __init__(self, what: str, cause: OSError | None = None) -> None:
        """*what* failed, as a clause without a full stop; *cause* is the kernel's answer, if it gave one."""
        reason = "" if cause is None else os.strerror(cause.errno) if cause.errno else str(cause)
        super().__init__(f"{what}: {reason}" if reason else what)
        self.what = what
        self.errno = None if cause is None else cause.errno
        """The error number; None if the kernel gave none."""
