"""The objects of all manifest files, and the events that follow when files change.

If several files hold an object, the first file by name is used, and the next one when that is deleted. An
object that becomes invalid keeps its last good version, as an API server would have refused the update; so
do all objects of a malformed file. Endpoints are mirrored as EndpointSlices while their Service has none.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from kproxy_core.model.endpoint import EndpointSlice
from kproxy_core.model.service import ServiceName
from kproxy_core.objects.decode import ENDPOINT_SLICES, ENDPOINTS, NODES, Malformed
from kproxy_core.objects.reading import shown
from kproxy_core.sources.directory.manifests import RESOURCES, Key, Manifest
from kproxy_core.store.events import (
    BadObject,
    Event,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
    limit_complaints,
)

Values = dict[Key, Any]
"""The `Reading.value` of each object."""


class Inventory:
    """The objects of all files. Nodes other than *node_name* are ignored."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._files: dict[str, Values] = {}
        self._holders: dict[Key, tuple[str, ...]] = {}
        """The files that hold an object, sorted: the first one is used."""
        self._bad: dict[str, frozenset[BadObject]] = {}
        """The problems reported for each file, as long as it has them."""
        self._failures: dict[str, str] = {}
        self._spares: dict[Key, frozenset[str]] = {}
        """The unused files of an object that have been reported."""
        self._own_slices: Counter[ServiceName] = Counter()
        """The number of slices of each Service that mirror nothing."""
        self._mirrored: dict[ServiceName, tuple[EndpointSlice, ...]] = {}
        """The slices announced for Endpoints objects."""

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

    def has_failed(self, file: str) -> bool:
        return file in self._failures

    def _fail(self, file: str, problem: str) -> list[BadObject]:
        if self._failures.get(file) == problem:
            return []
        self._failures[file] = problem
        return [BadObject("file", shown(file), "", problem)]

    def _take(self, file: str, manifest: Manifest, before: Values) -> list[BadObject]:
        """Record the new content of *file*. Put the values used so far, of changed objects, into *before*."""
        old = self._files.get(file, {})
        new: Values = {}
        bad = list(manifest.bad)
        for key, value in manifest.objects:
            if key[0] == NODES.kind and key[1] != ("", self._node_name):
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
        reported = self._bad.pop(file, frozenset())
        if bad:
            self._bad[file] = frozenset(bad)
        return [problem for problem in dict.fromkeys(bad) if problem not in reported]

    def _value(self, key: Key) -> Any:
        """Return the value used for the object *key*; None: there is none, or it is not for this proxy."""
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
            if isinstance(new, ServiceSet | SliceSet):
                new = replace(new, origin=f"file {shown(self._holders[key][0])}")
            events.append(RESOURCES[kind].gone(name) if new is None else new)
            if kind == ENDPOINT_SLICES.kind:
                for change, event in ((1, new), (-1, old)):
                    if event is not None:
                        self._own_slices[event.slice.service] += change
                        mirrors[event.slice.service] = None
        for service in mirrors:
            events.extend(self._mirror(service))
        return events

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
        """Report each file that holds *key* but is not used for it, once."""
        first, *spares = self._holders.get(key, ("",))
        reported = self._spares.pop(key, frozenset())
        if spares:
            self._spares[key] = frozenset(spares)
        for file in spares:
            if file not in reported:
                yield _report(key, f"is in {shown(file)} as well; the one in {shown(first)} is used")


def _report(key: Key, problem: str) -> BadObject:
    kind, (namespace, name) = key
    return BadObject(kind, f"{namespace}/{name}" if namespace else name, "", problem)
