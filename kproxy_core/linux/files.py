"""Files and directories: watched (inotify(7)), locked (flock(2)), and protected from other users."""

import contextlib
import ctypes
import fcntl
import logging
import os
import stat
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field

from kproxy_core.netlink.sockets import PollThread

log = logging.getLogger("kproxy.sources")

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
"""The path of the watched directory may lead to another directory now."""

_ONLYDIR = 0x01000000
_HEADER = struct.Struct("iIII")


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
        """Return all pending notices, oldest first."""
        pending = bytearray(4)
        fcntl.ioctl(self._fd, termios.FIONREAD, pending)
        data = os.read(self._fd, size) if (size := int.from_bytes(pending, sys.byteorder)) else b""
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


# Watches of a directory and of a file.

_DIRECTORY_MASK = (
    ENTRY_CHANGED | SELF_CHANGED | CLOSE_WRITE | MODIFY | ATTRIB)
_MAX_LINKS = 40
"""Links followed on the path to one file, as in Linux."""
_MAX_TRIES = 10

Entry = tuple[str, str]
"""A directory and a name in it."""


def is_manifest(name: str) -> bool:
    """Return True for the name of a manifest, and not of a hidden or an editor's file."""
    return name.endswith((".yaml", ".yml", ".json")) and not name.startswith(".")


class DirectoryChanges(Struct):
    manifests: list[tuple[str, Notice]] = field(default_factory=list)
    """Names of manifests, with the change of the manifest or of a link to it."""
    links: bool = False
    """Links may have changed: call `DirectoryWatch.renew`."""
    directory: bool = False
    """The directory may have been deleted, created or replaced: call `DirectoryWatch.renew`."""
    everything: bool = False
    """Notices were lost."""

    def add(self, later: "DirectoryChanges") -> None:
        self.manifests += later.manifests
        self.links |= later.links
        self.directory |= later.directory
        self.everything |= later.everything


class DirectoryWatch:
    """A watch on the directory *path* of manifests, through symbolic links on its path and in it.

    It covers the directory, every directory with a symbolic link on its path or on the path from a linked
    manifest to its file, and, while the directory does not exist, its nearest existing parent.

    Raises OSError if no inotify instance can be created.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._inotify = Inotify()
        self.directory: int | None = None
        """Identifies the directory at the path; None if there is none."""
        self._watches: set[int] = set()
        self._refused: dict[str, OSError] = {}
        """Directories that cannot be watched, and why."""
        self._behind: dict[tuple[int, str], set[str]] = {}
        """Entries on the path to linked manifests, with the names of those manifests; "": entries that decide
        which directory *path* leads to."""

    def fileno(self) -> int:
        return self._inotify.fileno()

    def close(self) -> None:
        self._inotify.close()

    @property
    def refusal(self) -> OSError | None:
        """Why the directory cannot be watched, for example because the user has too many watches."""
        return self._refused.get(self._path) if self.directory is None else None

    def renew(self, links: Iterable[str]) -> None:
        """Watch everything that the directory and its symbolic links *links* depend on now."""
        old, self._watches = self._watches, set()
        self.directory = self._follow_path()
        if self.directory is not None:
            for name in links:
                for folder, entry in entries_to(self._path, name):
                    self._await(folder, entry, name)
        for watch in old - self._watches:
            self._inotify.forget(watch)

    def _follow_path(self) -> int | None:
        """Watch the directory and the links to it; if it does not exist, the place where it would appear."""
        for _ in range(_MAX_TRIES):
            entries = entries_to("/", self._path)
            self._behind = {}
            for folder, entry in entries[:-1]:
                self._await(folder, entry, "")
            directory = self._watch(self._path)
            if directory is not None:
                return directory
            self._await(*entries[-1], "")
            # It may have been created before the watch existed.
            if not os.path.isdir(self._path) and entries_to("/", self._path) == entries:
                break
        return None

    def _await(self, folder: str, entry: str, name: str) -> None:
        """Watch for changes of *entry* in *folder*, which is on the path to the manifest *name*."""
        watch = self._watch(folder)
        if watch is not None:
            self._behind.setdefault((watch, entry), set()).add(name)

    def _watch(self, folder: str) -> int | None:
        try:
            watch = self._inotify.watch(folder, _DIRECTORY_MASK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if folder not in self._refused:
                log.error("cannot watch directory, changes in it will not be noticed", extra={"fields": {
                    "directory": folder, "error": error.strerror}})
            self._refused[folder] = error
            return None
        self._refused.pop(folder, None)
        self._watches.add(watch)
        return watch

    def read(self) -> DirectoryChanges:
        """Return the changes since the last call without waiting."""
        hints = DirectoryChanges()
        for notice in self._inotify.read():
            if notice.mask & Q_OVERFLOW:
                hints.everything = True
            elif notice.watch in self._watches:
                self._sort(notice, hints)
        return hints

    def _sort(self, notice: Notice, hints: DirectoryChanges) -> None:
        if notice.mask & OVER:
            hints.directory = True
            return
        if notice.watch == self.directory and is_manifest(notice.name):
            hints.manifests.append((notice.name, notice))
        changed = bool(notice.mask & ENTRY_CHANGED)
        for name in self._behind.get((notice.watch, notice.name), ()):
            if name:
                hints.manifests.append((name, notice))
                hints.links = hints.links or changed
            else:
                hints.directory = hints.directory or changed


def entries_to(folder: str, path: str) -> list[Entry]:
    """Return the directory entries that decide what *path*, relative to *folder*, is.

    These are the symbolic links on the way, in order, and the last entry that was reached.
    """
    entries: list[Entry] = []
    parts = path.split("/")[::-1]
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            folder = os.path.dirname(folder)
            continue
        here = os.path.join(folder, part)
        try:
            target = os.readlink(here)
        except OSError:
            if not any(parts) or not os.path.isdir(here):
                entries.append((folder, part))
                break
            folder = here
            continue
        entries.append((folder, part))
        if len(entries) > _MAX_LINKS:
            break
        if target.startswith("/"):
            folder = "/"
        parts.extend(target.split("/")[::-1])
    return entries


_FILE_MASK = ENTRY_CHANGED | SELF_CHANGED | CLOSE_WRITE


class FileWatch:
    """Calls *changed*, from a thread of its own, when the file *path* no longer holds *content*.

    The file may be rewritten, replaced, or reached through changed links: the kubelet updates a mounted
    ConfigMap by renaming a link, ``..data``, on the path to the file.

    *changed* returns the content that counts as unchanged from then on; None: it is not called again. A file
    that is missing or being written does not count as changed. Without inotify no change is noticed, which is
    logged.
    """

    def __init__(self, path: str, content: bytes, changed: Callable[[], bytes | None]) -> None:
        self._path = os.path.abspath(path)
        self._changed = changed
        self._watched: dict[int, set[str]] = {}
        """Names by watch: every directory entry that decides which file is at the path."""
        self._watch: PollThread | None = None
        try:
            self._notices = Inotify()
        except OSError as error:
            log.error("cannot watch file, changes will not be noticed", extra={
                "fields": {"file": self._path, "error": error.strerror}})
            return
        self._renew()
        run = self._run(content)
        self._watch = PollThread("config file", self._notices.fileno(), run.__next__, first=0.0)

    def close(self) -> None:
        """Stop watching; *changed* is not called after this returns."""
        if self._watch is not None:
            self._watch.close()
            self._notices.close()

    def _run(self, content: bytes | None) -> Iterator[None]:
        suspected = True  # It may have changed before it was watched.
        while True:
            if suspected and content is not None and self._differs(content):
                content = self._changed()
            yield
            suspected = any(
                notice.mask & (OVER | Q_OVERFLOW)
                or notice.name in self._watched.get(notice.watch, ()) for notice in self._notices.read())
            if suspected:
                self._renew()

    def _renew(self) -> None:
        watched: dict[int, set[str]] = {}
        for folder, entry in entries_to("/", self._path):
            try:
                watched.setdefault(self._notices.watch(folder, _FILE_MASK), set()).add(entry)
            except OSError as error:
                log.warning("cannot watch directory", extra={
                    "fields": {"directory": folder, "error": error.strerror}})
        for watch in self._watched.keys() - watched.keys():
            self._notices.forget(watch)
        self._watched = watched

    def _differs(self, content: bytes) -> bool:
        try:
            return Path(self._path).read_bytes() not in (content, b"")
        except OSError:
            return False


# Locks, and files of this program alone.

class FileLock:
    """A lock on one file, which the kernel releases when the process ends, even after SIGKILL.

    The file exists while a process holds the lock, and after one was killed while it did.
    """

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


def read_private(path: Path, most: int) -> bytes:
    """Return the bytes of *path*. Raises OSError, or ValueError if it is no file of *most* bytes or fewer."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"longer than {most} bytes")
    return content


def replace_private(path: Path, content: bytes) -> None:
    """Write *path* as a whole, in a directory that is created if necessary. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
