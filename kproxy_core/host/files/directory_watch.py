"""A watch on one directory of manifests, through symbolic links on its path and in it.

It covers the directory, every directory with a symbolic link on its path or on the path from a linked
manifest to its file, and, while the directory does not exist, its nearest existing parent.
"""

import logging
import os
from collections.abc import Iterable

from msgspec import Struct, field

from kproxy_core.host.files import inotify
from kproxy_core.host.files.inotify import Inotify, Notice

log = logging.getLogger("kproxy.sources")

_MASK = (
    inotify.ENTRY_CHANGED | inotify.SELF_CHANGED | inotify.CLOSE_WRITE | inotify.MODIFY | inotify.ATTRIB)
_MAX_LINKS = 40
"""Links followed on the path to one file, as in Linux."""
_MAX_TRIES = 10

Entry = tuple[str, str]
"""A directory and a name in it."""


def is_manifest(name: str) -> bool:
    """Return True for the name of a manifest, and not of a hidden or an editor's file."""
    return name.endswith((".yaml", ".yml", ".json")) and not name.startswith(".")


class Hints(Struct):
    manifests: list[tuple[str, Notice]] = field(default_factory=list)
    """Names of manifests, with the change of the manifest or of a link to it."""
    links: bool = False
    """Links may have changed: call `DirectoryWatch.renew`."""
    directory: bool = False
    """The directory may have been deleted, created or replaced: call `DirectoryWatch.renew`."""
    everything: bool = False
    """Notices were lost."""


class DirectoryWatch:
    """A watch on the directory *path*. Raises OSError if no inotify instance can be created."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inotify = Inotify()
        self.directory: int | None = None
        """Identifies the directory at the path; None if there is none."""
        self._watches: set[int] = set()
        self._refused: set[str] = set()
        self._behind: dict[tuple[int, str], set[str]] = {}
        """Entries on the path to linked manifests, with the names of those manifests; "": entries that decide
        which directory *path* leads to."""

    def fileno(self) -> int:
        return self._inotify.fileno()

    def close(self) -> None:
        self._inotify.close()

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
            watch = self._inotify.watch(folder, _MASK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if folder not in self._refused:
                self._refused.add(folder)
                log.error("cannot watch directory, changes in it will not be noticed", extra={"fields": {
                    "directory": folder, "error": error.strerror}})
            return None
        self._watches.add(watch)
        return watch

    def read(self) -> Hints:
        """Return the changes since the last call without waiting."""
        hints = Hints()
        for notice in self._inotify.read():
            if notice.mask & inotify.Q_OVERFLOW:
                hints.everything = True
            elif notice.watch in self._watches:
                self._sort(notice, hints)
        return hints

    def _sort(self, notice: Notice, hints: Hints) -> None:
        if notice.mask & inotify.OVER:
            hints.directory = True
            return
        if notice.watch == self.directory and is_manifest(notice.name):
            hints.manifests.append((notice.name, notice))
        changed = bool(notice.mask & inotify.ENTRY_CHANGED)
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
