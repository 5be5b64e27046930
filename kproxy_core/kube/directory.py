"""Services, endpoints and nodes from a directory of manifests, followed as they change."""

import enum
import errno
import logging
import os
import stat
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Raw, Struct, structs
from msgspec.structs import replace

from kproxy_core.kube import decode
from kproxy_core.kube.decode import ENDPOINT_SLICES, ENDPOINTS, NODES, SERVICE_CIDRS, SERVICES, Malformed
from kproxy_core.kube.forward import Objects, WireForward, read_forward
from kproxy_core.kube.reading import quoted, shown
from kproxy_core.kube.yaml import NotYaml, Unfinished, documents
from kproxy_core.linux import files
from kproxy_core.linux.errors import doing
from kproxy_core.linux.files import DirectoryChanges, DirectoryWatch, is_manifest
from kproxy_core.model.events import (
    BadObject,
    Complete,
    Emit,
    Event,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
    limit_complaints,
)
from kproxy_core.model.service import EndpointSlice, ServiceName, SliceName
from kproxy_core.model.timing import Backoff
from kproxy_core.netlink.sockets import PollThread

log = logging.getLogger("kproxy.sources")

FORWARDS = decode.Resource(
    "Forward", "kproxy.dev/v1", "forwards", WireForward, read_forward, namespaced=False)

RESOURCES: dict[str, decode.Resource[Any, Any]] = {
    resource.kind: resource
    for resource in (
        decode.SERVICES, decode.ENDPOINT_SLICES, decode.ENDPOINTS, decode.NODES, decode.SERVICE_CIDRS,
        FORWARDS,
    )
}
"""The kinds that a manifest may hold for a proxy. Other kinds are ignored."""

Key = tuple[str, tuple[str, str]]
"""Kind, and namespace and name, of an object."""

MOST_STRAY = 1000
"""Limit for documents and items that are no API objects: a file with more of them is no manifest."""
_MAX_LISTS = 4
"""Limit for the nesting of Lists."""
MAX_BYTES = 16 << 20
"""Limit in bytes for a manifest."""
MAX_VALUES = 1_000_000
"""Limit for the commas in a JSON manifest: its longest list is decoded at one stroke."""

GRACE = 0.02
"""Delay in seconds before a missing file counts as deleted, and before an unclosed file is read."""
_LONGEST_HOLD = 2 * GRACE
"""Upper bound in seconds for which changes wait for earlier removals: files may vanish all the time."""
_RECENT = 0.05
"""Age in seconds below which a time stamp, which may be 10 ms late, does not tell two versions apart."""
_DOUBT = 1.0
"""Seconds without a write after which a file that appeared with broken content is final."""
_LONGEST_DOUBT = 3 * _DOUBT
"""Upper bound in seconds for which the other files wait at the start for one that is being written."""
_LARGE = 32 << 10
"""Size in bytes from which a manifest is parsed in slices: 30 ms as YAML."""
_HUGE = 1 << 20
"""Size in bytes from which manifests wait for each other, but not smaller ones for them: 1 s as YAML."""
_SLICE = 0.02
"""Seconds for which a large manifest is parsed before other changes are looked for."""
_BATCH = 256
"""Files between two deliveries of events in a scan."""
_FINAL = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR})
"""Errors of reading that persist until the file changes, which is noticed; all others may be temporary."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""Errors not due to the file: until such files were read, not everything that exists is known."""


# Manifests.


class _Head(Struct, frozen=True, rename="camel"):
    api_version: Any = None
    kind: Any = None
    items: Raw = Raw(b"null")


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_items = msgspec.json.Decoder(list[Raw] | None).decode


@dataclass(slots=True)
class Manifest:
    """The API objects in one file."""

    objects: list[tuple[Key, Any]] = field(default_factory=list)
    """Every object with a valid name, and its `Reading.value`, in the order of the file."""
    bad: list[BadObject] = field(default_factory=list)
    """Problems in the file, at most `MOST_COMPLAINTS` and one that counts the rest."""
    stray: int = 0
    """Documents and items that are no API objects, empty ones included."""

    def _add(self, where: str, resource: decode.Resource[Any, Any], value: bytes | Raw) -> None:
        reading = resource.from_json(value)
        if reading.name is not None:
            self.objects.append(((resource.kind, reading.name), reading.value))
        for bad in reading.bad:
            if resource is FORWARDS and bad.name:
                self.bad.append(structs.replace(bad, name=f"{bad.name} in {where}"))
            else:
                self.bad.append(bad if bad.name else structs.replace(bad, name=where))

    def _complain(self, kind: str, where: str, path: str, problem: str) -> None:
        self.bad.append(BadObject(shown(kind), where, path, problem))
        self.note_stray()

    def note_stray(self) -> None:
        """Count a document or item that is no API object. Raises Malformed if there are too many."""
        self.stray += 1
        if self.stray > MOST_STRAY:
            raise decode.Malformed(f"more than {MOST_STRAY} documents or items are no API objects")


def read_manifest(name: str, data: bytes) -> Manifest:
    """Return the objects in *data*, the content of the file *name*.

    Reads JSON if the name or the first character says so, else YAML. Raises Malformed if the file as a whole
    is neither.
    """
    manifest = Manifest()
    for _ in fill(manifest, name, data):
        pass
    return manifest


def fill(manifest: Manifest, name: str, data: bytes) -> Iterator[None]:
    """Do as `read_manifest`, for the empty *manifest*, but pause every few milliseconds at most."""
    if not data or data.isspace():
        raise decode.Malformed("is empty")
    yield from _read(manifest, name, data, shown(name))
    manifest.bad = limit_complaints(manifest.bad, "file", shown(name))


def _read(manifest: Manifest, name: str, data: bytes, where: str) -> Iterator[None]:
    is_json = name.endswith(".json")
    if is_json or data[:64].lstrip().startswith(b"{"):
        if data.count(b",") > MAX_VALUES:
            raise decode.Malformed(f"has more than {MAX_VALUES} values")
        try:
            return (yield from _collect(manifest, where, data.removeprefix(BOM_UTF8)))
        except decode.UNDECODABLE as error:
            if is_json:
                raise decode.Malformed(f"is not a JSON object: {decode.explained(error).problem}") from error
            # YAML may start with a brace, too.
    number = 1
    try:
        for value in documents(data):
            yield
            if value is Unfinished:
                continue
            if value is None:
                manifest.note_stray()
            else:
                place = f"{where} document {number}" if number > 1 else where
                yield from _collect_value(manifest, place, value)
            number += 1
    except NotYaml as error:
        raise decode.Malformed(f"is not YAML: {error}") from error


def _collect_value(manifest: Manifest, where: str, value: object, lists: int = 0) -> Iterator[None]:
    try:
        yield from _collect(manifest, where, msgspec.json.encode(value), lists)
    except decode.UNDECODABLE as error:
        manifest._complain("object", where, "", decode.explained(error).problem)


def _collect(manifest: Manifest, where: str, value: bytes | Raw, lists: int = 0) -> Iterator[None]:
    """Add the object or objects of *value*. Raises one of UNDECODABLE if it is no JSON object."""
    head = _decode_head(value)
    kind, version = head.kind, head.api_version
    if not isinstance(kind, str) or not kind:
        return manifest._complain("object", where, "kind", "is missing")
    if not isinstance(version, str) or not version:
        return manifest._complain(kind, where, "apiVersion", "is missing")
    if kind == "List" and version == "v1":
        return (yield from _collect_items(manifest, where, head, None, lists + 1))
    resource = RESOURCES.get(kind.removesuffix("List"))
    if resource is None or _group(version) != _group(resource.api_version):
        if problem := _misspelt(kind, version):
            manifest._complain(kind, where, "kind", problem)
        return None  # another kind, perhaps one of the same name in another API
    if version != resource.api_version:
        return manifest._complain(
            kind, where, "apiVersion", f"{quoted(version)} is not {resource.api_version}")
    if kind != resource.kind:
        return (yield from _collect_items(manifest, where, head, resource, lists + 1))
    return manifest._add(where, resource, value)


def _misspelt(kind: str, version: str) -> str:
    """Return what is wrong with the *kind* of an object that is not for kproxy; "": nothing.

    Any kind of kproxy.dev would be known here. In groups of Kubernetes, a kind that is spelt nearly like one
    of those that kproxy reads is a mistake: no kind of Kubernetes is.
    """
    from difflib import get_close_matches  # most directories hold no such kind

    group = _group(version)
    known = {each.lower(): each for each, of in RESOURCES.items() if _group(of.api_version) == group}
    close = get_close_matches(kind.lower(), known, 1, _CLOSE)
    if not close and group != _group(FORWARDS.api_version):
        return ""
    return f"{quoted(kind)} is not known" + (f"; is {known[close[0]]} meant?" if close else "")


_CLOSE = 0.8
"""As difflib measures it; a Secret and a Service have 0.62."""


def _collect_items(
    manifest: Manifest, where: str, head: _Head, resource: decode.Resource[Any, Any] | None, lists: int
) -> Iterator[None]:
    """Add the items of a list. *resource* is the kind of its items; None: each item names its own."""
    if lists > _MAX_LISTS:
        return manifest._complain(head.kind, where, "", "lists are nested too deeply")
    try:
        items = _decode_items(head.items) or []
    except decode.UNDECODABLE:
        return manifest._complain(head.kind, where, "items", "is not a list")
    for i, item in enumerate(items):
        yield
        place = f"{where} items[{i}]"
        if resource is None:
            yield from _collect_value(manifest, place, item, lists)
        else:
            manifest._add(place, resource, item)
    return None


def _group(version: str) -> str:
    return version.rpartition("/")[0]


Values = dict[Key, Any]
"""The `Reading.value` of each object."""


class Inventory:
    """The objects of all manifests, and the events that follow when files change.

    If several files hold an object, the first file by name is used, and the next one when that is deleted. An
    object that becomes invalid keeps its last valid version, as an API server would have refused the update;
    so do all objects of a malformed file. Endpoints are mirrored as EndpointSlices while their Service has
    none.

    Nodes other than *node_name* are ignored.
    """

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._files: dict[str, Values] = {}
        self._holders: dict[Key, tuple[str, ...]] = {}
        """Files that hold an object, sorted: the first one is used."""
        self._bad: dict[str, tuple[BadObject, ...]] = {}
        """Problems reported for each file, as long as it has them."""
        self._failures: dict[str, str] = {}
        self._spares: dict[Key, frozenset[str]] = {}
        """Unused files of an object that have been reported."""
        self._own_slices: Counter[ServiceName] = Counter()
        """Number of slices of each Service that are not mirrors."""
        self._mirrored: dict[ServiceName, tuple[EndpointSlice, ...]] = {}
        """Slices delivered for Endpoints objects."""
        self._other_nodes: dict[str, str] = {}
        """By file, the name of the first Node in it that is another one."""

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, changes: Mapping[str, Manifest | Malformed | None]) -> list[Event]:
        """Return the events for files with new content; None: the file is gone."""
        before: Values = {}
        reports: list[BadObject] = []
        for file, content in changes.items():
            if isinstance(content, Malformed):
                reports.extend(self._fail(file, str(content)))
            else:
                self._failures.pop(file, None)
                reports.extend(self._take(file, content or Manifest(), before))
        events = self._differences(before)
        spares = [report for key in before for report in self._report_spares(key)]
        return [*events, *reports, *limit_complaints(spares, "directory", "(objects in several files)")]

    def problems(self) -> list[BadObject]:
        """Return the problems of all files, by file. Any thread may call it."""
        found = [(file, [_failure(file, problem)]) for file, problem in list(self._failures.items())]
        found += [(file, [*bad]) for file, bad in list(self._bad.items())]
        spares = (_spare(key, file, self._holders.get(key, (file,))[0])
                  for key, files in list(self._spares.items()) for file in sorted(files))
        return [*(each for _, bad in sorted(found, key=itemgetter(0)) for each in bad), *spares,
                *self._missing_node()]

    def _missing_node(self) -> Iterator[BadObject]:
        """Yield that this node's Node is missing, if there are others: perhaps it has another name."""
        key = (NODES.kind, ("", self._node_name))
        others = list(self._other_nodes.items())
        if others and key not in self._holders:
            file, name = others[0]
            yield _report(key, f"there is no such Node, but Node {name} in {shown(file)}")

    def has_failed(self, file: str) -> bool:
        return file in self._failures

    def has_problems(self, file: str) -> bool:
        """Return whether *file* has failed, or holds a bad object."""
        return file in self._failures or file in self._bad

    def would_lose(self, file: str, content: "Content") -> bool:
        """Return whether an object that only *file* holds would vanish with this content."""
        if isinstance(content, Malformed):
            return False
        kept = {key for key, _ in content.objects} if content else set()
        return any(key not in kept and self._holders[key] == (file,) for key in self._files.get(file, ()))

    def _fail(self, file: str, problem: str) -> list[BadObject]:
        if self._failures.get(file) == problem:
            return []
        self._failures[file] = problem
        return [_failure(file, problem)]

    def _take(self, file: str, manifest: Manifest, before: Values) -> list[BadObject]:
        """Record the new content of *file*. Put the previous values of changed objects into *before*."""
        old = self._files.get(file, {})
        new: Values = {}
        bad = list(manifest.bad)
        self._other_nodes.pop(file, None)
        for key, value in manifest.objects:
            if key[0] == NODES.kind and key[1] != ("", self._node_name):
                self._other_nodes.setdefault(file, key[1][1])
                continue
            if key in new:
                bad.append(_report(key, f"is in {shown(file)} more than once"))
            elif value is not None:
                new[key] = value
            elif key in old:
                new[key] = old[key]
        alone = (file,)
        for key in {**old, **new}:
            if old.get(key) == new.get(key):
                continue
            before.setdefault(key, self._value(key))
            others = [holder for holder in self._holders.get(key, ()) if holder != file]
            if key in new:
                self._holders[key] = tuple(sorted([*others, file])) if others else alone
            elif others:
                self._holders[key] = tuple(others)
            else:
                del self._holders[key]
        if new:
            self._files[file] = new
        else:
            self._files.pop(file, None)
        reported = self._bad.pop(file, ())
        if bad:
            self._bad[file] = tuple(dict.fromkeys(bad))
        return [problem for problem in self._bad.get(file, ()) if problem not in reported]

    def _value(self, key: Key) -> Any:
        """Return the value used for the object *key*; None: it does not exist, or is not for this proxy."""
        holders = self._holders.get(key)
        value = self._files[holders[0]].get(key) if holders else None
        return None if isinstance(value, (ServiceGone, SliceGone)) else value

    def _differences(self, before: Values) -> list[Event]:
        """Return the events that lead from the values *before* to those used now."""
        events: list[Event] = []
        mirrors: dict[ServiceName, None] = {}
        for key, old in before.items():
            new = self._value(key)
            if new == old:
                continue
            kind, name = key
            if kind == ENDPOINTS.kind:
                mirrors[ServiceName(*name)] = None
                continue
            if kind == FORWARDS.kind:
                events.extend(self._forward(key, old or (), new or ()))
                continue
            if isinstance(new, ServiceSet | SliceSet):
                new = replace(new, origin=self._origin(key))
            events.append(RESOURCES[kind].gone(name) if new is None else new)
            if kind == ENDPOINT_SLICES.kind:
                for change, event in ((1, new), (-1, old)):
                    if event is not None:
                        self._own_slices[event.slice.service] += change
                        mirrors[event.slice.service] = None
        for service in mirrors:
            events.extend(self._mirror(service))
        return events

    def _origin(self, key: Key) -> str:
        return f"file {shown(self._holders[key][0])}"

    def _forward(self, key: Key, old: Objects, new: Objects) -> Iterator[Event]:
        """Yield the events that lead from the objects of a Forward to others."""
        known = {_name(event): event for event in old}
        for event in new:
            if known.pop(_name(event), None) == event:
                continue
            yield replace(event, origin=self._origin(key))
        for name in known:
            yield ServiceGone(name) if isinstance(name, ServiceName) else SliceGone(name)

    def _mirror(self, service: ServiceName) -> Iterator[Event]:
        """Yield the events that update the slices mirroring the Endpoints of *service*."""
        wanted: tuple[EndpointSlice, ...] = ()
        if not self._own_slices[service]:
            del self._own_slices[service]
            wanted = self._value((ENDPOINTS.kind, service)) or ()
        announced = {piece.name: piece for piece in self._mirrored.pop(service, ())}
        if wanted:
            self._mirrored[service] = wanted
        for piece in wanted:
            if announced.pop(piece.name, None) != piece:
                yield SliceSet(piece)
        for name in announced:
            yield SliceGone(name)

    def _report_spares(self, key: Key) -> Iterator[BadObject]:
        """Report, once, each file that holds *key* but is not used for it."""
        first, *spares = self._holders.get(key, ("",))
        reported = self._spares.pop(key, frozenset())
        if spares:
            self._spares[key] = frozenset(spares)
        for file in spares:
            if file not in reported:
                yield _spare(key, file, first)


def _name(event: ServiceSet | SliceSet) -> ServiceName | SliceName:
    return event.service.name if isinstance(event, ServiceSet) else event.slice.name


def _failure(file: str, problem: str) -> BadObject:
    return BadObject("file", shown(file), "", problem)


def _spare(key: Key, file: str, used: str) -> BadObject:
    return _report(key, f"is in {shown(file)} as well; the one in {shown(used)} is used")


def _report(key: Key, problem: str) -> BadObject:
    kind, (namespace, name) = key
    return BadObject(kind, f"{namespace}/{name}" if namespace else name, "", problem)


# The source.

Content = Manifest | Malformed | None
"""None: there is no such file."""


class _Why(enum.Enum):
    """The reason for reading a file."""

    SCANNED = enum.auto()
    """It was found: it may have been written a moment ago, by a writer who is not done yet."""
    CLOSED = enum.auto()
    """Its writer closed it or renamed it into place, or it could not be read when that happened."""
    VANISHED = enum.auto()
    LINKED = enum.auto()
    """It appeared with content: its writer is not done yet, or it was complete when linked here."""
    DOUBTED = enum.auto()
    """It was closed or appeared with content that was broken a moment later."""
    WRITTEN = enum.auto()
    """It is being written, and is complete once it is valid (JSON)."""


@dataclass(slots=True, eq=False)
class _Parsing:
    """A large manifest that is being parsed, or will be."""

    why: _Why
    is_huge: bool
    steps: Iterator[None] | None = None
    """None: it has not been read yet."""
    manifest: Manifest = field(default_factory=Manifest)
    changed: bool = False
    """It changed after it was read."""


class _NotNow(Exception):
    """A manifest will be read later."""


class _Held(Struct):
    """A change that makes objects vanish, which large manifests that are being parsed may hold by now."""

    content: Content
    parsed: list[_Parsing]
    """These manifests, and others that ended meanwhile."""


class DirectorySource:
    """Delivers the objects in the manifests in directory *path*, for the node *node_name*, and their changes.

    Manifests are the files ``*.yaml``, ``*.yml`` and ``*.json`` in the directory itself. It may be created
    later, deleted and created again; while it is missing, its last state is kept.

    The kernel reports changes (inotify): nothing is polled, and a change costs only the files that it
    touches. A file is read when its writer closes it or renames it into place. A file that vanishes counts as
    deleted after a grace period, because many programs replace a file by removing it first; later changes
    wait as long, so that all take effect in order. A file that can't be read for lack of resources is
    retried.

    A file that was written a moment ago when the directory is scanned, as at the start, is read after the
    same grace period; if it is broken then, or is being written, nothing is complete for a while.

    Large files are parsed in slices, between which other changes take effect, except for those that make
    objects vanish: an object may be moving into the large file.
    """

    kinds = tuple(kind.plural for kind in (SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS))

    def __init__(
        self, path: str | os.PathLike[str], node_name: str, *, grace: float = GRACE,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """*grace* is the delay in seconds before a missing file counts as deleted.

        *report* is told what keeps all manifests from being read; "": nothing does.
        """
        self._report_problem = report
        self._path = os.path.abspath(path)
        self._grace = grace
        self._inventory = Inventory(node_name)
        self._known: dict[str, int] = {}
        """The fingerprint of every manifest that was read."""
        self._links: set[str] = set()
        """The manifests that are symbolic links."""
        self._noticed = DirectoryChanges()
        """Changes that are not dealt with yet."""
        self._being_written: set[str] = set()
        """Manifests that a process has written to, and not closed."""
        self._due: dict[str, tuple[float, _Why]] = {}
        """Manifests to read, and when (monotonic seconds)."""
        self._certain_at = 0.0
        """Time at which all vanished files count as deleted (monotonic seconds)."""
        self._unread: dict[str, int | None] = {}
        """The errno of manifests, and under "" of the directory, whose last reading failed."""
        self._retry_at: float | None = None
        """Time at which all of them are read again (monotonic seconds)."""
        self._backoff = Backoff()
        self._parsing: dict[str, _Parsing] = {}
        """Large manifests, in the order in which they changed."""
        self._held: dict[str, _Held] = {}
        self._awaited: set[str] = set()
        """Manifests that the last scan found, and that were not applied yet."""
        self._awaited_until = 0.0
        """Time until which those may still be written to (monotonic seconds)."""
        self._scanned = False
        self._complete = False
        self._missing = False
        self._announced = True
        """Whether the log tells that the directory was read."""
        self._stopping = False

    def start(self, emit: Emit) -> None:
        """Start delivering. Raises HostError if the kernel grants no inotify instance."""
        self._emit = emit
        with doing(f"watch the directory of manifests {shown(self._path)} (inotify)"):
            self._watch = DirectoryWatch(self._path)
        self._thread = PollThread("kproxy-manifests", self._watch.fileno(), self._run().__next__, first=0.0)

    def problems(self) -> list[BadObject]:
        return self._inventory.problems()

    def stop(self) -> None:
        self._stopping = True
        self._thread.close()
        self._watch.close()

    def _run(self) -> Iterator[float | None]:
        """Read the directory, and follow its changes. Yield the timeout in seconds for the next one."""
        self._renew()
        changes: dict[str, Content] = {}
        at_the_latest = apply_at = 0.0  # by the monotonic clock; 0: at once
        while True:
            yield self._seconds_to_next(apply_at if changes else None)
            self._notice()
            hints, self._noticed = self._noticed, DirectoryChanges()
            if not apply_at or hints.directory or hints.everything:
                self._apply(changes)
            now = time.monotonic()
            if not changes:
                at_the_latest = now + _LONGEST_HOLD
            self._follow(hints, changes)
            self._look_at_due(changes, now)
            self._retry(changes, now)
            self._parse_large(changes)
            self._stop_awaiting(changes, now)
            apply_at = min(self._certain_at, at_the_latest)
            if apply_at <= now:
                apply_at = 0.0

    def _seconds_to_next(self, apply_at: float | None) -> float | None:
        if self._parsing or self._held or self._noticed != DirectoryChanges():
            return 0.0
        times = [when for when, _ in self._due.values()]
        times += [at for at in (apply_at, self._retry_at) if at is not None]
        if self._awaited:
            times.append(self._awaited_until)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _notice(self) -> set[str]:
        """Take note of the changes until now. Return the manifests written to since the last call."""
        changes = self._watch.read()
        self._noticed.add(changes)
        written = set()
        for name, notice in changes.manifests:
            if notice.mask & files.MODIFY:
                self._being_written.add(name)
                written.add(name)
            elif notice.mask & (files.CLOSE_WRITE | files.ENTRY_CHANGED):
                self._being_written.discard(name)
        return written

    def _renew(self) -> bool:
        """Find the directory, and read it if it is another one. Return whether it is."""
        before = self._watch.directory
        self._watch.renew(self._links)
        if error := self._watch.refusal:
            self._postpone("cannot watch the directory of manifests, retrying", "", error)
            self._report_problem(f"directory {shown(self._path)} cannot be watched: {error.strerror}")
            self._missing = True
        elif self._watch.directory is None:
            if not self._missing:
                log.warning("directory of manifests is missing, waiting for it", extra={
                    "fields": {"directory": self._path, "objects_kept": len(self._inventory)}})
                self._report_problem(f"directory {shown(self._path)} is missing, waiting for it")
                self._awaited.clear()
                self._scanned = self._complete
            self._missing = True
        elif self._watch.directory != before:
            if self._missing:
                self._report_problem("")
            self._missing = self._announced = False
            self._scan()
            return True
        return False

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
        for name in self._held.keys() & found.keys():
            self._forget_removal({}, name)
        self._being_written.clear()
        changed = {name for name, entry in found.items() if not self._is_known(entry)}
        self._awaited = changed | self._awaited & found.keys()
        self._awaited_until = time.monotonic() + _LONGEST_DOUBT
        changes: dict[str, Content] = {}
        for name in sorted(changed):
            if self._stopping:
                return
            self._read_into(changes, name, _Why.SCANNED)
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

    def _follow(self, hints: DirectoryChanges, changes: dict[str, Content]) -> None:
        """Read into *changes* every file that is complete, and schedule the others."""
        scanned = hints.directory and self._renew()
        if hints.everything:
            self._scan()
        if scanned or hints.everything:
            return  # the notices are older, perhaps of another directory
        if hints.links:
            self._watch.renew(self._links)
        moved = {notice.cookie: name for name, notice in hints.manifests if notice.mask & files.MOVED_TO}
        renamed: dict[str, str] = {}
        settled: dict[str, None] = {}
        for name, notice in hints.manifests:
            if notice.mask & files.MOVED_FROM and notice.cookie in moved:
                self._due.pop(name, None)
                changes[name] = None
                renamed[name] = moved[notice.cookie]
            elif self._is_settled(name, notice.mask):
                self._due.pop(name, None)
                settled[name] = None
        self._note_links(settled)
        for name in settled:
            if os.path.exists(self._path_of(name)):
                self._forget_removal(changes, name)
                self._read_into(changes, name, _Why.CLOSED)
            else:
                self._look_later(name, _Why.VANISHED)
        for name, new_name in renamed.items():
            if name in changes and changes[name] is None:
                self._abandon(name, new_name)

    def _abandon(self, name: str, new_name: str) -> None:
        """Stop parsing the manifest *name*. What waits for it waits for *new_name* instead."""
        parsing, new = self._parsing.pop(name, None), self._parsing.get(new_name)
        for held in self._held.values():
            if parsing in held.parsed and new is not None:
                held.parsed.append(new)

    def _is_settled(self, name: str, mask: int) -> bool:
        """Return whether a manifest is complete after the change *mask*. Schedule one that is not yet."""
        if mask & (files.CLOSE_WRITE | files.MOVED_TO):
            return True
        if mask & (files.DELETE | files.MOVED_FROM):
            self._look_later(name, _Why.VANISHED)
        elif mask & files.CREATE:
            self._due.pop(name, None)
            return self._is_linked(name)
        elif mask & files.MODIFY:
            _, why = self._due.get(name, (0.0, None))
            if name.endswith(".json"):
                if why is not _Why.WRITTEN:
                    self._look_later(name, _Why.WRITTEN)
            elif why in (_Why.LINKED, _Why.DOUBTED):
                del self._due[name]
        return bool(mask & files.ATTRIB) and self._inventory.has_failed(name)

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
        when = time.monotonic() + (self._grace if why is _Why.VANISHED else GRACE)
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
            self._read_into(changes, name, why)

    def _read_into(self, changes: dict[str, Content], name: str, why: _Why) -> None:
        """Read the manifest *name* into *changes*, at once or later."""
        try:
            content = self._attempt(name, lambda: self._read(name, why))
        except _NotNow:
            return
        self._conclude(changes, name, why, content)

    def _attempt(self, name: str, read: Callable[[], Content]) -> Content:
        """Return what *read* returns, or what its error says of the manifest *name*. Raises _NotNow."""
        try:
            return read()
        except Malformed as error:
            return error.with_traceback(None)
        except _NotNow:
            self._unread.pop(name, None)
            raise
        except OSError as error:
            self._known[name] = 0
            if error.errno == errno.ENOENT:
                is_link = os.path.islink(self._path_of(name))
                return Malformed("is a symbolic link to nothing") if is_link else None
            if error.errno in _FINAL:
                return Malformed(f"can't be read: {error.strerror}")
            self._awaited.discard(name)
            self._postpone("cannot read a manifest, retrying", name, error)
            raise _NotNow from error

    def _conclude(self, changes: dict[str, Content], name: str, why: _Why, content: Content) -> None:
        """Put *content* into *changes*, unless its writer is perhaps not done."""
        self._unread.pop(name, None)
        if isinstance(content, Malformed):
            if why is _Why.WRITTEN:
                return
            if (doubt := self._doubt(name, why)) > 0:
                self._due[name] = time.monotonic() + doubt, _Why.DOUBTED
                return
        elif content is None and not os.path.isdir(self._path):
            return  # the whole directory is missing
        self._parsing.pop(name, None)
        changes[name] = content

    def _doubt(self, name: str, why: _Why) -> float:
        """Return the seconds for which to wait for better content of the broken manifest *name*."""
        if why is _Why.LINKED:
            return _DOUBT
        try:
            status = os.stat(self._path_of(name))
        except OSError:
            return 0.0
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return 0.0
        age = time.time() - status.st_mtime
        if why is _Why.SCANNED:
            return max(GRACE, _DOUBT - max(0.0, age))
        if why is _Why.CLOSED and not status.st_size:
            # A next writer may have truncated it already: ext4 takes 50 ms and more to tell, under load.
            return _DOUBT
        return GRACE if why is _Why.CLOSED or 0 <= age < _RECENT else 0.0

    def _forget_removal(self, changes: dict[str, Content], name: str) -> None:
        """Do not apply the removal of the manifest *name*, which exists again."""
        if changes.get(name) is None:
            changes.pop(name, None)
        if name in self._held and self._held[name].content is None:
            del self._held[name]

    def _parse_large(self, changes: dict[str, Content]) -> None:
        """Parse a slice of the first large manifest, and of the first huge one."""
        for is_huge in (False, True):
            name = next((name for name, parsing in self._parsing.items() if parsing.is_huge is is_huge), None)
            if name is not None:
                self._parse(changes, name, self._parsing[name])

    def _parse(self, changes: dict[str, Content], name: str, parsing: _Parsing) -> None:
        try:
            content = self._attempt(name, lambda: self._proceed(name, parsing))
        except _NotNow:
            if parsing.steps is None:  # It is being written, or can't be read for now.
                del self._parsing[name]
            return
        del self._parsing[name]
        self._conclude(changes, name, parsing.why, content)
        if parsing.changed:
            self._read_into(changes, name, _Why.CLOSED)

    def _proceed(self, name: str, parsing: _Parsing) -> Manifest:
        """Parse a slice. Raises Malformed, OSError, or _NotNow if more is left or it can't be begun."""
        until = time.monotonic() + _SLICE
        if parsing.steps is None:
            parsing.steps = fill(parsing.manifest, name, self._load(name))
        for _ in parsing.steps:
            if self._stopping or time.monotonic() >= until:
                raise _NotNow
        return parsing.manifest

    def _stop_awaiting(self, changes: dict[str, Content], now: float) -> None:
        """Let manifests that are still being written keep the others no longer from being used."""
        if now < self._awaited_until:
            return
        for name in self._awaited - self._parsing.keys() - changes.keys() - self._held.keys():
            self._awaited.discard(name)
            if not self._complete:
                changes[name] = Malformed("is being written, and is used once it is closed")

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
        if not self._complete:
            self._awaited |= self._unread.keys() - {""}
            self._awaited_until = now + _LONGEST_DOUBT
        for name in sorted(self._unread, reverse=True):
            if name:
                self._read_into(changes, name, _Why.CLOSED)
            elif self._watch.directory is None:
                self._renew()
            else:
                self._scan()
        if not self._unread:
            self._backoff.reset()
            log.info("all manifests can be read again")

    def _note_links(self, names: Iterable[str]) -> None:
        """Watch the targets of new links among *names* before these are read."""
        paths = {name: self._path_of(name) for name in names}
        links = {name for name, path in paths.items() if os.path.islink(path)}
        if links - self._links or (paths.keys() - links) & self._links:
            self._links = self._links - paths.keys() | links
            self._watch.renew(self._links)

    def _path_of(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _read(self, name: str, why: _Why) -> Content:
        """Return the content of the manifest *name*; None: it is none, or a directory.

        Raises Malformed, OSError, or _NotNow if it is read later.
        """
        self._known[name] = 0
        status = os.stat(self._path_of(name))
        if stat.S_ISDIR(status.st_mode):
            return None
        self._known[name] = _fingerprint(status)
        if not stat.S_ISREG(status.st_mode):
            raise Malformed("is not a regular file")
        if status.st_size > MAX_BYTES:
            raise Malformed(f"is larger than {MAX_BYTES >> 20} MiB")
        if why is _Why.SCANNED and not self._known[name]:
            self._look_later(name, _Why.LINKED)
            raise _NotNow
        if status.st_size > _LARGE:
            if name not in self._parsing:
                self._parsing[name] = _Parsing(why, status.st_size > _HUGE)
            elif self._parsing[name].steps is not None:
                self._parsing[name].changed = True
            raise _NotNow
        return read_manifest(name, self._load(name))

    def _load(self, name: str) -> bytes:
        """Return the bytes of the manifest *name*.

        Raises OSError, or _NotNow if it was written to meanwhile: it is read once its writer closes it.
        """
        with open(self._path_of(name), "rb", buffering=0, opener=_open) as file:
            data = file.readall() or b""
        if not name.endswith(".json") and (name in self._notice() or name in self._being_written):
            self._known[name] = 0
            raise _NotNow
        return data

    def _apply(self, changes: dict[str, Content]) -> None:
        """Deliver the events for *changes*, empty it, and deliver `Complete` once all files were read."""
        ready = self._hold_back(changes) if self._parsing or self._held else changes.copy()
        changes.clear()
        for name, content in ready.items():
            if content is None:
                self._known.pop(name, None)
                self._links.discard(name)
        before = [name for name in ready if self._inventory.has_problems(name)]
        events: list[Event] = self._inventory.apply(ready) if ready else []
        for name in before:
            if ready[name] is not None and not self._inventory.has_problems(name):
                log.info("manifest was corrected, all of it is used", extra={"fields": {"file": shown(name)}})
        self._awaited -= ready.keys()
        if self._scanned and not self._awaited and "" not in self._unread:
            self._all_read(events)
        if events and not self._stopping:
            self._emit(events)

    def _hold_back(self, changes: Mapping[str, Content]) -> dict[str, Content]:
        """Return *changes* without those by which objects vanish that a large manifest may hold by now.

        They are applied with the last of the large manifests that are being parsed now.
        """
        ready: dict[str, Content] = {}
        for name, content in changes.items():
            held = self._held.pop(name, None)
            if self._inventory.would_lose(name, content):
                self._held[name] = _Held(content, held.parsed if held else [*self._parsing.values()])
            else:
                ready[name] = content
        for name, held in list(self._held.items()):
            held.parsed = [parsing for parsing in self._parsing.values() if parsing in held.parsed]
            if not held.parsed:
                ready[name] = self._held.pop(name).content
        return ready

    def _all_read(self, events: list[Event]) -> None:
        """Log that the directory was read, and add `Complete` to *events*, if that is news."""
        if not self._announced:
            self._announced = True
            log.info("directory of manifests read", extra={"fields": {
                "directory": self._path, "files": len(self._known), "objects": len(self._inventory)}})
        if not self._complete and _EXHAUSTED.isdisjoint(self._unread.values()):
            self._complete = True
            events += [Complete(kind) for kind in self.kinds]


def _open(path: str, flags: int) -> int:
    """Open *path* without blocking, even if it has become a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _fingerprint(status: os.stat_result) -> int:
    """Return a number that changes with the file; 0: unknown, as its time stamp is too recent."""
    if time.time_ns() - status.st_mtime_ns < _RECENT * 1e9:
        return 0
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
