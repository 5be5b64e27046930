"""Services, endpoints and nodes from a directory of manifests, followed as they change.

The kernel reports changes in the directory (inotify); nothing is polled, and a change costs the files that
it touches. A file is read when its writer closes it or renames it into place. A file that vanishes is given
a moment to return, because many programs replace a file by removing it first; later changes wait as long,
so that all take effect in order. A file that can't be read for lack of resources is read again until it can.
"""

import enum
import errno
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator

from kproxy_core.host.files import inotify
from kproxy_core.host.files.directory_watch import DirectoryWatch, Hints, is_manifest
from kproxy_core.host.watch import Watch
from kproxy_core.objects.decode import ENDPOINT_SLICES, NODES, SERVICE_CIDRS, SERVICES, Malformed
from kproxy_core.objects.reading import shown
from kproxy_core.sources.directory.inventory import Inventory
from kproxy_core.sources.directory.manifests import Manifest, read_manifest
from kproxy_core.store.events import Complete, Emit, Event
from kproxy_core.timing.backoff import Backoff

log = logging.getLogger("kproxy.sources")

GRACE = 0.02
"""Seconds before a missing file is gone, and a file that is written but not closed is read."""
_LONGEST_HOLD = 2 * GRACE
"""Limit in seconds for which changes wait for removals before them: files may vanish all the time."""
_DOUBT = 1.0
"""Seconds without a write after which a file that appeared with broken content is final."""
MAX_BYTES = 16 << 20
"""Limit in bytes for a manifest."""
_BATCH = 256
"""Files between two deliveries of events in a scan."""
_FINAL = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR})
"""Errors of reading that only a change to the file ends, which is noticed; all others may pass."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""Errors that are no fault of the file: until such files were read, not everything that exists is known."""

Content = Manifest | Malformed | None
"""None: there is no such file."""


class _Why(enum.Enum):
    """The reason for reading a file in a moment."""

    VANISHED = enum.auto()
    LINKED = enum.auto()
    """It appeared with content: its writer is not done yet, or it was complete when linked here."""
    DOUBTED = enum.auto()
    """It appeared with content that was broken a moment later."""
    WRITTEN = enum.auto()
    """It is being written, and is complete once it is valid (JSON)."""


class DirectorySource:
    """Delivers the objects in the manifests in directory *path*, for the node *node_name*.

    Manifests are the files ``*.yaml``, ``*.yml`` and ``*.json`` in the directory itself. It may be created
    later, deleted and created again; while it is missing, its last state is kept.
    """

    kinds = tuple(kind.plural for kind in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))

    def __init__(self, path: str | os.PathLike[str], node_name: str) -> None:
        self._path = os.path.abspath(path)
        self._inventory = Inventory(node_name)
        self._known: dict[str, int] = {}
        """The fingerprint of every manifest that was read."""
        self._links: set[str] = set()
        """The manifests that are symbolic links."""
        self._due: dict[str, tuple[float, _Why]] = {}
        """Manifests to read, and when (monotonic seconds)."""
        self._certain_at = 0.0
        """Time at which all files that vanished are gone for certain (monotonic seconds)."""
        self._unread: dict[str, int | None] = {}
        """The errno of manifests, and under "" of the directory, that could not be read when tried last."""
        self._retry_at: float | None = None
        """Time at which all of them are tried again (monotonic seconds)."""
        self._backoff = Backoff()
        self._scanned = False
        self._complete = False
        self._missing = False
        self._stopping = False

    def start(self, emit: Emit) -> None:
        """Start delivering. Raises OSError if the kernel grants no inotify instance."""
        self._emit = emit
        self._watch = DirectoryWatch(self._path)
        self._thread = Watch("kproxy-manifests", self._watch.fileno(), self._run().__next__, first=0.0)

    def stop(self) -> None:
        self._stopping = True
        self._thread.close()
        self._watch.close()

    def _run(self) -> Iterator[float | None]:
        """Read the directory, and follow its changes. Yield the seconds to wait for the next at most."""
        self._renew()
        changes: dict[str, Content] = {}
        at_the_latest = apply_at = 0.0  # by the monotonic clock; 0: at once
        while True:
            yield self._seconds_to_next(apply_at if changes else None)
            hints = self._watch.read()
            for name, notice in hints.manifests:
                if notice.mask & inotify.MODIFY:
                    # Perhaps read while the next writer was at work, who will close it.
                    changes.pop(name, None)
            if not apply_at or hints.directory or hints.everything:
                self._apply(changes)
            now = time.monotonic()
            if not changes:
                at_the_latest = now + _LONGEST_HOLD
            self._follow(hints, changes)
            self._look_at_due(changes, now)
            self._retry(changes, now)
            apply_at = min(self._certain_at, at_the_latest)
            if apply_at <= now:
                apply_at = 0.0

    def _seconds_to_next(self, apply_at: float | None) -> float | None:
        times = [when for when, _ in self._due.values()]
        times += [at for at in (apply_at, self._retry_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _renew(self) -> None:
        """Find the directory, and read it if it is another one."""
        before = self._watch.directory
        self._watch.renew(self._links)
        if self._watch.directory is None:
            if not self._missing:
                log.warning("directory of manifests is missing, waiting for it", extra={
                    "fields": {"directory": self._path, "objects_kept": len(self._inventory)}})
            self._missing = True
        elif self._watch.directory != before:
            self._missing = False
            self._scan()
            log.info("directory of manifests read", extra={"fields": {
                "directory": self._path, "files": len(self._known), "objects": len(self._inventory)}})

    def _scan(self) -> None:
        """Read every manifest whose fingerprint differs from that of the last reading."""
        try:
            with os.scandir(self._path) as entries:
                found = {entry.name: entry for entry in entries if is_manifest(entry.name)}
            links = {name for name, entry in found.items() if entry.is_symlink()}
        except OSError as error:
            self._postpone("cannot list the directory of manifests, retrying", "", error)
            return
        self._unread.pop("", None)
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
                self._read_into(changes, name)
            if len(changes) == _BATCH:
                self._apply(changes)
        self._scanned = True
        self._apply(changes)

    def _is_known(self, entry: os.DirEntry[str]) -> bool:
        try:
            seen = self._known.get(entry.name)
            return bool(seen) and seen == _fingerprint(entry.stat())
        except OSError:
            return False

    def _follow(self, hints: Hints, changes: dict[str, Content]) -> None:
        """Read into *changes* every file that is complete, and schedule the others."""
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
                self._read_into(changes, name)
            else:
                self._look_later(name, _Why.VANISHED)

    def _is_settled(self, name: str, mask: int) -> bool:
        """Return whether a manifest is complete right after *mask*. If it may be later, schedule it."""
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
        """Return whether a manifest that has just appeared is a link, not a file that is being written."""
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
                continue  # it returned, and its writer will close it
            read: dict[str, Content] = {}
            self._read_into(read, name)
            if name not in read:
                continue
            content = read[name]
            if why in (_Why.WRITTEN, _Why.LINKED) and not isinstance(content, Manifest):
                if why is _Why.LINKED:
                    self._due[name] = now + _DOUBT, _Why.DOUBTED
                continue  # not complete yet
            if content is None and not os.path.isdir(self._path):
                continue  # the whole directory is missing
            changes[name] = content

    def _read_into(self, changes: dict[str, Content], name: str) -> None:
        """Read the manifest *name* into *changes*; if it can't be read for now, try again later."""
        try:
            changes[name] = self._read(name)
        except OSError as error:
            self._known[name] = 0
            self._postpone("cannot read a manifest, retrying", name, error)
        else:
            self._unread.pop(name, None)

    def _postpone(self, event: str, name: str, error: OSError) -> None:
        """Schedule another attempt, and log the first problem since everything could be read."""
        if self._retry_at is None:
            delay = self._backoff.delay()
            self._retry_at = time.monotonic() + delay
            if not self._unread:
                log.warning(event, extra={"fields": {
                    "file": shown(name or self._path), "error": error.strerror, "retry_in": round(delay, 1)}})
        self._unread[name] = error.errno

    def _retry(self, changes: dict[str, Content], now: float) -> None:
        """Read again the manifests, and the directory, that could not be read before."""
        if self._retry_at is None or now < self._retry_at:
            return
        self._retry_at = None
        for name in sorted(self._unread, reverse=True):
            if name:
                self._read_into(changes, name)
            else:
                self._scan()
        if not self._unread:
            self._backoff.reset()
            log.info("all manifests can be read again")

    def _note_links(self, names: Iterable[str]) -> None:
        """Watch the targets of the new links among *names*, which are read next."""
        paths = {name: self._path_of(name) for name in names}
        links = {name for name, path in paths.items() if os.path.islink(path)}
        if links - self._links or (paths.keys() - links) & self._links:
            self._links = self._links - paths.keys() | links
            self._watch.renew(self._links)

    def _path_of(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _read(self, name: str) -> Content:
        """Return the content of the manifest *name*. Raises OSError if it can't be read for now."""
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
            if error.errno not in _FINAL:
                raise
            self._known[name] = 0
            return Malformed(f"can't be read: {error.strerror}")
        except Malformed as error:
            return error.with_traceback(None)

    def _apply(self, changes: dict[str, Content]) -> None:
        """Deliver the events for *changes*, empty it, and deliver `Complete` once all files were read."""
        for name, content in changes.items():
            if content is None:
                self._known.pop(name, None)
                self._links.discard(name)
        events: list[Event] = self._inventory.apply(changes) if changes else []
        changes.clear()
        if self._scanned and not self._complete and _EXHAUSTED.isdisjoint(self._unread.values()):
            self._complete = True
            events += [Complete(kind) for kind in self.kinds]
        if events and not self._stopping:
            self._emit(events)


def _open(path: str, flags: int) -> int:
    """Open *path* without blocking, even if it has become a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _fingerprint(status: os.stat_result) -> int:
    """Return a number that changes with the file; 0: unknown, as its time stamp is too recent."""
    if time.time_ns() - status.st_mtime_ns < 50_000_000:
        return 0
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
