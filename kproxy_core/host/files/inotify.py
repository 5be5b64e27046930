"""Linux inotify: notices of changes in directories. See inotify(7)."""

import ctypes
import os
import struct
from typing import NamedTuple

MODIFY = 0x2
ATTRIB = 0x4
CLOSE_WRITE = 0x8
MOVED_FROM = 0x40
MOVED_TO = 0x80
CREATE = 0x100
DELETE = 0x200
DELETE_SELF = 0x400
MOVE_SELF = 0x800
UNMOUNT = 0x2000
Q_OVERFLOW = 0x4000
IGNORED = 0x8000

ENTRY_CHANGED = CREATE | DELETE | MOVED_FROM | MOVED_TO
SELF_CHANGED = DELETE_SELF | MOVE_SELF
OVER = SELF_CHANGED | UNMOUNT | IGNORED
"""The path of the watched directory may lead elsewhere now."""

_ONLYDIR = 0x01000000
_HEADER = struct.Struct("iIII")
_BUFFER = 1 << 16


class Notice(NamedTuple):
    """One change."""

    watch: int
    """The result of `Inotify.watch` for the directory; -1 in a `Q_OVERFLOW`."""
    mask: int
    cookie: int
    """Equal in the `MOVED_FROM` and the `MOVED_TO` of one rename."""
    name: str
    """The entry in the directory; "" for the directory itself."""


class Inotify:
    """An inotify instance. `fileno` is readable while notices are pending."""

    def __init__(self) -> None:
        """Raises OSError, for example if the user has too many instances."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._call(self._libc.inotify_init1, os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def watch(self, path: str, mask: int) -> int:
        """Watch the directory *path* and return the watch's number; a watched directory keeps its number.

        Raises OSError if it does not exist or is no directory, or if there are too many watches.
        """
        return self._call(self._libc.inotify_add_watch, self._fd, os.fsencode(path), mask | _ONLYDIR)

    def forget(self, watch: int) -> None:
        """Stop watching. Does nothing if the watch does not exist."""
        self._libc.inotify_rm_watch(self._fd, watch)

    def read(self) -> list[Notice]:
        """Return the pending notices, oldest first."""
        try:
            data = os.read(self._fd, _BUFFER)
        except BlockingIOError:
            return []
        notices = []
        start = 0
        while start < len(data):
            watch, mask, cookie, length = _HEADER.unpack_from(data, start)
            start += _HEADER.size
            name = os.fsdecode(data[start:start + length].rstrip(b"\0"))
            notices.append(Notice(watch, mask, cookie, name))
            start += length
        return notices

    def close(self) -> None:
        os.close(self._fd)

    @staticmethod
    def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> int:
        result: int = function(*arguments)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
