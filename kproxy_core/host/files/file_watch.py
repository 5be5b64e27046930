"""A watch for changed contents of a file: rewritten, replaced, or reached through changed links.

The kubelet updates a mounted ConfigMap by renaming a link, ``..data``, on the path to the file.
"""

import logging
import os
import select
import threading
from collections.abc import Callable

from kproxy_core.host.files import inotify
from kproxy_core.host.files.directory_watch import entries_to
from kproxy_core.host.files.inotify import Inotify

log = logging.getLogger("kproxy.sources")

_ENTRY = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO
_GONE = inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.IGNORED | inotify.UNMOUNT
_MASK = _ENTRY | inotify.CLOSE_WRITE | inotify.DELETE_SELF | inotify.MOVE_SELF


class FileWatch:
    """Calls *changed* once, from a thread of its own, when the file *path* no longer holds *content*.

    A file that is missing or being written does not count as changed. Without inotify no change is noticed,
    which is logged.
    """

    def __init__(self, path: str, content: bytes, changed: Callable[[], None]) -> None:
        self._path = os.path.abspath(path)
        self._content = content
        self._changed = changed
        self._thread = threading.Thread(target=self._run, name="config file", daemon=True)
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching; *changed* is not called after this returns."""
        os.eventfd_write(self._stopped, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._stopped)

    def _run(self) -> None:
        try:
            notices = Inotify()
        except OSError as error:
            log.error("cannot watch file, changes will not be noticed", extra={
                "fields": {"file": self._path, "error": error.strerror}})
            return
        try:
            self._follow(notices)
        finally:
            notices.close()

    def _follow(self, notices: Inotify) -> None:
        readable = select.poll()
        for descriptor in (notices.fileno(), self._stopped):
            readable.register(descriptor, select.POLLIN)
        watched = self._watch(notices, {})
        # The file may have changed before it was watched.
        while not self._differs():
            ready = {descriptor for descriptor, _ in readable.poll()}
            if self._stopped in ready:
                return
            for notice in notices.read():
                if notice.mask & (_GONE | inotify.Q_OVERFLOW) or notice.name in watched.get(notice.watch, ()):
                    break
            else:
                continue
            watched = self._watch(notices, watched)
        self._changed()

    def _watch(self, notices: Inotify, before: dict[int, set[str]]) -> dict[int, set[str]]:
        """Watch every directory entry that decides which file is at the path; return names by watch."""
        watched: dict[int, set[str]] = {}
        for folder, entry in entries_to("/", self._path):
            try:
                watched.setdefault(notices.watch(folder, _MASK), set()).add(entry)
            except OSError as error:
                log.warning("cannot watch directory", extra={
                    "fields": {"directory": folder, "error": error.strerror}})
        for watch in before.keys() - watched.keys():
            notices.forget(watch)
        return watched

    def _differs(self) -> bool:
        try:
            with open(self._path, "rb") as file:
                content = file.read()
        except OSError:
            return False
        return content not in (self._content, b"")
