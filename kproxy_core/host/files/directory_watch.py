"""Watching one directory of manifests, wherever its path and the links in it lead.

What is watched: the directory; every directory on its path, or on the way from a
linked manifest to its file, that holds a symbolic link; and while the directory is
not there, the nearest one above.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from kproxy_core.host.files import inotify
from kproxy_core.host.files.inotify import Inotify, Notice

log = logging.getLogger("kproxy.sources")

_ENTRY_CHANGED = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO
_SELF_CHANGED = inotify.DELETE_SELF | inotify.MOVE_SELF
_MASK = _ENTRY_CHANGED | _SELF_CHANGED | inotify.CLOSE_WRITE | inotify.MODIFY | inotify.ATTRIB
_OVER = _SELF_CHANGED | inotify.UNMOUNT | inotify.IGNORED
_MOST_LINKS = 40
"""On the way to one file: as many as Linux follows."""
_MOST_TRIES = 10

Entry = tuple[str, str]
"""A directory and a name in it."""


def is_manifest(name: str) -> bool:
    """Whether a file of that *name* is a manifest, and not an editor's or hidden one."""
    return name.endswith((".yaml", ".yml", ".json")) and not name.startswith(".")


@dataclass(slots=True)
class Hints:
    """What may have changed."""

    manifests: list[tuple[str, Notice]] = field(default_factory=list)
    """Manifests by name and what happened to them, or behind a link to them."""
    links: bool = False
    """Links may lead elsewhere: `DirectoryWatch.renew`."""
    directory: bool = False
    """The directory may be gone, there, or another: `DirectoryWatch.renew`."""
    everything: bool = False
    """Notices were lost."""


class DirectoryWatch:
    """Watches *path*. Raises OSError if the kernel does not grant an inotify instance."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inotify = Inotify()
        self.directory: int | None = None
        """What tells this directory from another one at the same path; None: there is none."""
        self._watches: dict[int, str] = {}
        self._refused: set[str] = set()
        self._on_path: set[tuple[int, str]] = set()
        """Entries that decide where *path* leads."""
        self._behind: dict[tuple[int, str], set[str]] = {}
        """Entries that decide what linked manifests are, and which."""

    def fileno(self) -> int:
        return self._inotify.fileno()

    def close(self) -> None:
        self._inotify.close()

    def renew(self, links: Iterable[str]) -> None:
        """Watch what the directory and its manifests *links*, which are symbolic links, depend on now."""
        old, self._watches = self._watches, {}
        self.directory = self._follow_path()
        self._behind = {}
        if self.directory is not None:
            for name in links:
                for folder, entry in entries_to(self._path, name):
                    watch = self._watch(folder)
                    if watch is not None:
                        self._behind.setdefault((watch, entry), set()).add(name)
        for watch in old.keys() - self._watches.keys():
            self._inotify.forget(watch)

    def _follow_path(self) -> int | None:
        """Watch the directory and the links to it; if it is not there, whatever brings it back."""
        for _ in range(_MOST_TRIES):
            entries = entries_to("/", self._path)
            self._on_path = set()
            for folder, entry in entries[:-1]:
                self._await(folder, entry)
            directory = self._watch(self._path)
            if directory is not None:
                return directory
            self._await(*entries[-1])
            # It may have come before anything was there to tell.
            if not os.path.isdir(self._path) and entries_to("/", self._path) == entries:
                break
        return None

    def _await(self, folder: str, entry: str) -> None:
        watch = self._watch(folder)
        if watch is not None:
            self._on_path.add((watch, entry))

    def _watch(self, folder: str) -> int | None:
        try:
            watch = self._inotify.watch(folder, _MASK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if folder not in self._refused:
                self._refused.add(folder)
                log.error("can't watch a directory, changes in it go unnoticed", extra={"fields": {
                    "directory": folder, "error": error.strerror}})
            return None
        self._watches[watch] = folder
        return watch

    def read(self) -> Hints:
        """What has happened since the last call; does not wait."""
        hints = Hints()
        for notice in self._inotify.read():
            if notice.mask & inotify.Q_OVERFLOW:
                hints.everything = True
            elif notice.watch in self._watches:
                self._sort(notice, hints)
        return hints

    def _sort(self, notice: Notice, hints: Hints) -> None:
        if notice.mask & _OVER:
            hints.directory = True
            return
        if notice.watch == self.directory and is_manifest(notice.name):
            hints.manifests.append((notice.name, notice))
        entry = notice.watch, notice.name
        if notice.mask & _ENTRY_CHANGED and entry in self._on_path:
            hints.directory = True
        for name in self._behind.get(entry, ()):
            hints.manifests.append((name, notice))
            hints.links = hints.links or bool(notice.mask & _ENTRY_CHANGED)


def entries_to(folder: str, path: str) -> list[Entry]:
    """The directory entries that decide what *path*, seen from *folder*, is.

    Each symbolic link on the way, in order; last the entry where the way ends, or
    is broken off.
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
        if len(entries) > _MOST_LINKS:
            break
        if target.startswith("/"):
            folder = "/"
        parts.extend(target.split("/")[::-1])
    return entries
