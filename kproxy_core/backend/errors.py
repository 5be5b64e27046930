"""What a backend raises. The loop chooses by type; it never reads a message."""

from kproxy_core.model.address import Family


class BackendError(Exception):
    """Anything a backend reports as failed."""


class SyncFailed(BackendError):
    """The kernel refused an update as a whole; nothing of it was remembered.

    The loop tries the same changes again, after a growing delay.
    """


class TrustLost(SyncFailed):
    """The kernel does not hold what the backend believes it does.

    The loop follows up with a full update, for which the backend reads the kernel afresh.
    """


class Unsupported(BackendError):
    """This kernel or machine lacks what the backend needs; retrying is pointless."""

    def __init__(self, problem: str = "", family: Family | None = None) -> None:
        """*family*: the only IP family that can't be served; None: nothing can."""
        super().__init__(problem)
        self.family = family
