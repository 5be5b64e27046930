"""A lock that the kernel releases when the process ends, even after SIGKILL (flock(2))."""

import fcntl
import os
from pathlib import Path


class FileLock:
    """The lock on one file, as seen by this process."""

    def __init__(self, path: Path) -> None:
        """Create the file and its directory, for this user alone, where they do not exist. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)

    def acquire(self) -> bool:
        """Take the lock and return True, or return False if another process has it. Raises OSError."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        os.close(self._descriptor)
