"""Services, endpoints and nodes from a directory of manifests, followed as they change.

The kernel says what happens in the directory (inotify); nothing is polled, and a
change costs the files it touches. A file is read when its writer closes it or
renames it into place. What vanishes is given a moment to come back, because many
programs replace a file by removing it first; what changed after it waits as long, so
that changes take effect in their order.
"""

import enum
import logging
import os
import select
import stat
import threading
import time
from collections.abc import Iterable
from math import ceil

from kproxy_core.host.files import inotify
from kproxy_core.host.files.directory_watch import DirectoryWatch, Hints, is_manifest
from kproxy_core.objects.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES, Malformed
from kproxy_core.sources.directory.inventory import Inventory
from kproxy_core.sources.directory.manifests import Manifest, read_manifest
from kproxy_core.store.events import Complete, Emit, Event

log = logging.getLogger("kproxy.sources")

GRACE = 0.02
"""Seconds that a file may be away, or be written to without being closed, before that counts."""
_LONGEST_HOLD = 2 * GRACE
"""Seconds that changes wait for removals before them at most: files may vanish all the time."""
_DOUBT = 1.0
"""Seconds that a file which appeared with broken content may be quiet before its writer is done with it."""
MAX_BYTES = 16 << 20
"""The largest manifest that is read."""
_BATCH = 256
"""Files between two deliveries of events in a scan."""

Content = Manifest | Malformed | None


class _Why(enum.Enum):
    """Why a file is to be looked at in a moment."""

    VANISHED = enum.auto()
    LINKED = enum.auto()
    """It appeared with content; its writer may be at work, or it was complete when linked here."""
    DOUBTED = enum.auto()
    """It appeared with content that was broken a moment later."""
    WRITTEN = enum.auto()
    """It is being written to, and tells by itself when it is complete (JSON)."""


class DirectorySource:
    """Delivers the objects in the manifests in directory *path* that concern the node *node_name*.

    Files ``*.yaml``, ``*.yml`` and ``*.json`` count, not those in directories below. The
    directory may come later, go, and come back; while it is away its last state holds.
    """

    kinds = tuple(kind.plural for kind in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))

    def __init__(self, path: str | os.PathLike[str], node_name: str) -> None:
        self._path = os.path.abspath(path)
        self._inventory = Inventory(node_name)
        self._known: dict[str, int] = {}
        """Every manifest that was looked at: a fingerprint of what was seen."""
        self._links: set[str] = set()
        """The manifests that are symbolic links."""
        self._due: dict[str, tuple[float, _Why]] = {}
        """Manifests to look at, and when (monotonic seconds)."""
        self._certain_at = 0.0
        """When it will be certain of all that vanished that it is gone (monotonic seconds)."""
        self._complete = False
        self._missing = False
        self._stopping = False

    def start(self, emit: Emit) -> None:
        """Begin to deliver. Raises OSError if the kernel grants no inotify instance."""
        self._emit = emit
        self._watch = DirectoryWatch(self._path)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kproxy-manifests", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop delivering."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._watch.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        self._renew()
        changes: dict[str, Content] = {}
        at_the_latest = apply_at = 0.0  # by the monotonic clock; 0: at once
        while not self._stopping:
            poll.poll(self._milliseconds_to_next(apply_at if changes else None))
            hints = self._watch.read()
            for name, notice in hints.manifests:
                if notice.mask & inotify.MODIFY:
                    # Perhaps read while the next writer was at work, who will close it.
                    changes.pop(name, None)
            if not apply_at or hints.directory or hints.everything:
                self._apply(changes)
                changes = {}
            now = time.monotonic()
            if not changes:
                at_the_latest = now + _LONGEST_HOLD
            self._follow(hints, changes)
            self._look_at_due(changes, now)
            apply_at = min(self._certain_at, at_the_latest)
            if apply_at <= now:
                apply_at = 0.0

    def _milliseconds_to_next(self, apply_at: float | None) -> int | None:
        times = [when for when, _ in self._due.values()]
        if apply_at is not None:
            times.append(apply_at)
        return max(0, ceil(1000 * (min(times) - time.monotonic()))) if times else None

    def _renew(self) -> None:
        """Find the directory; if it is there anew, read it."""
        before = self._watch.directory
        self._watch.renew(self._links)
        if self._watch.directory is None:
            if not self._missing:
                log.warning("the directory of manifests is not there; waiting for it", extra={
                    "fields": {"directory": self._path, "objects_kept": len(self._inventory)}})
            self._missing = True
        elif self._watch.directory != before:
            self._missing = False
            self._scan()
            log.info("read the directory of manifests", extra={"fields": {
                "directory": self._path, "files": len(self._known), "objects": len(self._inventory)}})

    def _scan(self) -> None:
        """Read every manifest that does not look as it did when it was read last."""
        try:
            with os.scandir(self._path) as entries:
                found = {entry.name: entry for entry in entries if is_manifest(entry.name)}
            links = {name for name, entry in found.items() if entry.is_symlink()}
        except OSError as error:
            log.error("can't read the directory of manifests", extra={"fields": {
                "directory": self._path, "error": error.strerror}})
            return
        if links != self._links:
            self._links = links
            self._watch.renew(links)
        for name in self._known.keys() - found.keys():
            self._look_later(name, _Why.VANISHED)
        changes: dict[str, Content] = {}
        for name in sorted(found):
            if self._stopping:
                return
            if not self._is_known(found[name]):
                changes[name] = self._read(name)
            if len(changes) == _BATCH:
                self._apply(changes)
                changes = {}
        self._apply(changes)
        if not self._complete:
            self._complete = True
            self._emit([Complete(kind) for kind in self.kinds])

    def _is_known(self, entry: os.DirEntry[str]) -> bool:
        try:
            seen = self._known.get(entry.name)
            return bool(seen) and seen == _fingerprint(entry.stat())
        except OSError:
            return False

    def _follow(self, hints: Hints, changes: dict[str, Content]) -> None:
        """Read into *changes* what is certain by now; note what is to be looked at in a moment."""
        if hints.directory:
            self._renew()
        elif hints.links:
            self._watch.renew(self._links)
        if hints.everything:
            self._scan()
        moved = {notice.cookie for _, notice in hints.manifests if notice.mask & inotify.MOVED_TO}
        settled: dict[str, None] = {}
        for name, notice in hints.manifests:
            if notice.mask & inotify.MOVED_FROM and notice.cookie in moved:
                self._due.pop(name, None)
                changes[name] = None
            elif self._is_settled(name, notice.mask):
                self._due.pop(name, None)
                changes.pop(name, None)
                settled[name] = None
        self._note_links(settled)
        for name in settled:
            if os.path.exists(self._path_of(name)):
                changes[name] = self._read(name)
            else:
                self._look_later(name, _Why.VANISHED)

    def _is_settled(self, name: str, mask: int) -> bool:
        """Whether a manifest can be read right after *mask* happened to it; if not, it may be due later."""
        if mask & (inotify.CLOSE_WRITE | inotify.MOVED_TO):
            return True
        if mask & (inotify.DELETE | inotify.MOVED_FROM):
            self._look_later(name, _Why.VANISHED)
        elif mask & inotify.CREATE:
            self._due.pop(name, None)
            return self._is_linked(name)
        elif mask & inotify.MODIFY:
            _, why = self._due.get(name, (0.0, None))
            if name.endswith(".json"):
                if why is not _Why.WRITTEN:
                    self._look_later(name, _Why.WRITTEN)
            elif why in (_Why.LINKED, _Why.DOUBTED):
                del self._due[name]
        return bool(mask & inotify.ATTRIB) and self._inventory.has_failed(name)

    def _is_linked(self, name: str) -> bool:
        """Whether a manifest that has just appeared is a link, not a file whose writer is at work."""
        try:
            status = os.stat(self._path_of(name))
        except OSError:
            return True
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            if status.st_size:
                self._look_later(name, _Why.LINKED)
            return False
        return True

    def _look_later(self, name: str, why: _Why) -> None:
        when = time.monotonic() + GRACE
        self._due[name] = when, why
        if why is _Why.VANISHED:
            self._certain_at = when

    def _look_at_due(self, changes: dict[str, Content], now: float) -> None:
        due = [(name, why) for name, (when, why) in self._due.items() if when <= now]
        self._note_links(name for name, _ in due)
        for name, why in due:
            del self._due[name]
            if why is _Why.VANISHED and name not in self._links and os.path.exists(self._path_of(name)):
                continue  # it is back, and its writer will close it
            content = self._read(name)
            if why in (_Why.WRITTEN, _Why.LINKED) and not isinstance(content, Manifest):
                if why is _Why.LINKED:
                    self._due[name] = now + _DOUBT, _Why.DOUBTED
                continue  # not complete yet
            if content is None and not os.path.isdir(self._path):
                continue  # it went with the directory
            changes[name] = content

    def _note_links(self, names: Iterable[str]) -> None:
        """Before *names* are read: watch what is behind those that are new links."""
        paths = {name: self._path_of(name) for name in names}
        links = {name for name, path in paths.items() if os.path.islink(path)}
        if links - self._links or (paths.keys() - links) & self._links:
            self._links = self._links - paths.keys() | links
            self._watch.renew(self._links)

    def _path_of(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _read(self, name: str) -> Content:
        """What the manifest *name* holds now; None: there is none."""
        path = self._path_of(name)
        try:
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                return None
            self._known[name] = _fingerprint(status)
            if not stat.S_ISREG(status.st_mode):
                return Malformed("is not a regular file")
            if status.st_size > MAX_BYTES:
                return Malformed(f"is larger than {MAX_BYTES >> 20} MiB")
            with open(path, "rb", buffering=0, opener=_open) as file:
                return read_manifest(name, file.readall() or b"")
        except FileNotFoundError:
            if not os.path.islink(path):
                return None
            self._known[name] = 0
            return Malformed("is a symbolic link to nothing")
        except OSError as error:
            self._known[name] = 0
            return Malformed(f"can't be read: {error.strerror}")
        except Malformed as error:
            return error.with_traceback(None)

    def _apply(self, changes: dict[str, Content]) -> None:
        """Deliver what follows from *changes*."""
        for name, content in changes.items():
            if content is None:
                self._known.pop(name, None)
                self._links.discard(name)
        events: list[Event] = self._inventory.apply(changes) if changes else []
        if events and not self._stopping:
            self._emit(events)


def _open(path: str, flags: int) -> int:
    """Open without waiting, should *path* have become a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _fingerprint(status: os.stat_result) -> int:
    """The same number as long as a file stays as it is; 0 if that can't be told.

    A file changed a moment ago may change again without showing it in its times.
    """
    if time.time_ns() - status.st_mtime_ns < 50_000_000:
        return 0
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
