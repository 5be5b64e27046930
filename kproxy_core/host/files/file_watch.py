"""A watch for changed contents of a file: rewritten, replaced, or reached through changed links.

The kubelet updates a mounted ConfigMap by renaming a link, ``..data``, on the path to the file.
"""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kproxy_core.host.files import inotify
from kproxy_core.host.files.directory_watch import entries_to
from kproxy_core.host.files.inotify import Inotify
from kproxy_core.host.watch import Watch

log = logging.getLogger("kproxy.sources")

_MASK = inotify.ENTRY_CHANGED | inotify.SELF_CHANGED | inotify.CLOSE_WRITE


class FileWatch:
    """Calls *changed*, from a thread of its own, when the file *path* no longer holds *content*.

    *changed* returns the content that counts as unchanged from then on; None: it is not called again. A file
    that is missing or being written does not count as changed. Without inotify no change is noticed, which is
    logged.
    """

    def __init__(self, path: str, content: bytes, changed: Callable[[], bytes | None]) -> None:
        self._path = os.path.abspath(path)
        self._changed = changed
        self._watched: dict[int, set[str]] = {}
        """Names by watch: every directory entry that decides which file is at the path."""
        self._watch: Watch | None = None
        try:
            self._notices = Inotify()
        except OSError as error:
            log.error("cannot watch file, changes will not be noticed", extra={
                "fields": {"file": self._path, "error": error.strerror}})
            return
        self._renew()
        self._watch = Watch("config file", self._notices.fileno(), self._run(content).__next__, first=0.0)

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
                notice.mask & (inotify.OVER | inotify.Q_OVERFLOW)
                or notice.name in self._watched.get(notice.watch, ()) for notice in self._notices.read())
            if suspected:
                self._renew()

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

    def _differs(self, content: bytes) -> bool:
        try:
            return Path(self._path).read_bytes() not in (content, b"")
        except OSError:
            return False
