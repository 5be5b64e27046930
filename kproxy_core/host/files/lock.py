"""A lock that the kernel releases when the process ends, even after SIGKILL (flock(2))."""

import contextlib
import fcntl
import os
from pathlib import Path


class FileLock:
    """The lock on one file, which exists while a process has the lock or has been killed with it."""

    def __init__(self, path: Path) -> None:
        """Create the file and its directory, for this user alone, where they do not exist. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._descriptor = self._open()

    def acquire(self) -> bool:
        """Take the lock and return True, or return False if another process has it. Raises OSError."""
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._is_current():
                return True
            # The process that had it deleted the file. Others may have created and locked the next one.
            deleted, self._descriptor = self._descriptor, self._open()
            os.close(deleted)

    def release(self) -> None:
        """Let another process take the lock, if this one has it. The file is deleted."""
        with contextlib.suppress(OSError):
            if self.acquire():
                self._path.unlink()
        os.close(self._descriptor)

    def _is_current(self) -> bool:
        """Return whether the file still has its name."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
