"""Noticing that a file has another content: rewritten, replaced, or behind links that lead elsewhere.

The last is how the kubelet updates a mounted ConfigMap: it renames a link, ``..data``, on the way to
the file.
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

    A file that is away, or is being written, has not changed yet. Without inotify nothing is noticed,
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
        """Stop watching; returns when *changed* will not be called any more."""
        os.eventfd_write(self._stopped, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._stopped)

    def _run(self) -> None:
        try:
            notices = Inotify()
        except OSError as error:
            log.error("can't watch a file, changes go unnoticed", extra={
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
        # What happened before there was a watch is seen by looking.
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
        """Watch every directory entry that decides which file the path leads to; by watch, their names."""
        watched: dict[int, set[str]] = {}
        for folder, entry in entries_to("/", self._path):
            try:
                watched.setdefault(notices.watch(folder, _MASK), set()).add(entry)
            except OSError as error:
                log.warning("can't watch a directory", extra={
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
