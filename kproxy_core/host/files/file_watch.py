"""A watch for changed contents of a file: rewritten, replaced, or reached through changed links.

The kubelet updates a mounted ConfigMap by renaming a link, ``..data``, on the path to the file.
"""

import logging
import os
from collections.abc import Callable

from kproxy_core.host.files import inotify
from kproxy_core.host.files.directory_watch import entries_to
from kproxy_core.host.files.inotify import Inotify
from kproxy_core.host.watch import Watch

log = logging.getLogger("kproxy.sources")

_ENTRY = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO
_GONE = inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.IGNORED | inotify.UNMOUNT
_MASK = _ENTRY | inotify.CLOSE_WRITE | inotify.DELETE_SELF | inotify.MOVE_SELF


class FileWatch:
    """Calls *changed*, from a thread of its own, when the file *path* no longer holds *content*.

    *changed* returns the content that counts as unchanged from then on; None: it is not called again. A file
    that is missing or being written does not count as changed. Without inotify no change is noticed, which is
    logged.
    """

    def __init__(self, path: str, content: bytes, changed: Callable[[], bytes | None]) -> None:
        """Start watching."""
        self._path = os.path.abspath(path)
        self._content: bytes | None = content
        self._changed = changed
        self._watched: dict[int, set[str]] = {}
        """Names by watch: every directory entry that decides which file is at the path."""
        self._suspected = True  # It may have changed before it was watched.
        self._watch: Watch | None = None
        try:
            self._notices = Inotify()
        except OSError as error:
            log.error("cannot watch file, changes will not be noticed", extra={
                "fields": {"file": self._path, "error": error.strerror}})
            return
        self._renew()
        self._watch = Watch("config file", self._notices.fileno(), self._check, first=0.0)

    def close(self) -> None:
        """Stop watching; *changed* is not called after this returns."""
        if self._watch is not None:
            self._watch.close()
            self._notices.close()

    def _check(self) -> None:
        notices = self._notices.read()
        if self._content is None:
            return
        if any(notice.mask & (_GONE | inotify.Q_OVERFLOW)
               or notice.name in self._watched.get(notice.watch, ()) for notice in notices):
            self._suspected = True
            self._renew()
        if self._suspected and self._differs():
            self._content = self._changed()
        self._suspected = False

    def _renew(self) -> None:
        watched: dict[int, set[str]] = {}
        for folder, entry in entries_to("/", self._path):
            try:
                watched.setdefault(self._notices.watch(folder, _MASK), set()).add(entry)
            except OSError as error:
                log.warning("cannot watch directory", extra={
                    "fields": {"directory": folder, "error": error.strerror}})
        for watch in self._watched.keys() - watched.keys():
            self._notices.forget(watch)
        self._watched = watched

    def _differs(self) -> bool:
        try:
            with open(self._path, "rb") as file:
                content = file.read()
        except OSError:
            return False
        return content not in (self._content, b"")
