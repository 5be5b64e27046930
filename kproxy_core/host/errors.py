"""What goes wrong between kproxy and the node's kernel, in one type."""

import os


class HostError(Exception):
    """The kernel refused something; ``str()`` says what, and why."""

    def __init__(self, what: str, cause: OSError) -> None:
        """*what* failed, as a clause without a full stop; *cause* is the kernel's answer."""
        reason = os.strerror(cause.errno) if cause.errno else str(cause)
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.errno = cause.errno
        """The error number; None if the kernel gave none."""
