"""The objects of the API server in memory, with the history that its watches follow."""

import datetime
import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kproxy_conformance.apiserver import protobuf

Json = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name."""

_TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"
_HISTORY = 50_000
"""Events of each resource that are kept for watches."""


def encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body: Json = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code,
        }  # fmt: skip


class Entry:
    """One version of one object; its JSON and its protobuf are made once."""

    def __init__(self, kind: str, obj: Json, version: int) -> None:
        self.kind = kind
        obj["metadata"]["resourceVersion"] = str(version)
        self.obj = obj
        self.version = version
        self.body = encode({key: value for key, value in obj.items() if key not in ("kind", "apiVersion")})

    @cached_property
    def protobuf(self) -> bytes:
        return protobuf.encode_item(self.kind, self.obj)

    @cached_property
    def stripped(self) -> "Entry":
        """The same version without its managed fields, which is made once, too."""
        meta = self.obj["metadata"]
        if "managedFields" not in meta:
            return self
        kept = {key: value for key, value in meta.items() if key != "managedFields"}
        return Entry(self.kind, {**self.obj, "metadata": kept}, self.version)


@dataclass(frozen=True, slots=True)
class Event:
    version: int
    kind: str
    """``ADDED``, ``MODIFIED`` or ``DELETED``."""
    entry: Entry
    old: Entry | None


class Resource:
    def __init__(self, prefix: str, plural: str, kind: str) -> None:
        self.prefix = prefix
        self.plural = plural
        self.kind = kind
        self.api_version = prefix.removeprefix("/apis/").removeprefix("/api/")
        self._head = encode({"kind": kind, "apiVersion": self.api_version})[:-1] + b","
        self.items: dict[Key, Entry] = {}
        self.history: deque[Event] = deque()
        """Oldest first."""
        self.forgotten = 0
        """The newest version that is no longer in the history."""

    def full(self, entry: Entry) -> bytes:
        """Return JSON with kind and apiVersion, as single objects and watch events have it."""
        return self._head + entry.body[1:]


def key_of(obj: Mapping[str, Any]) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


class Store:
    """All resources. `lock` guards them, and is notified of every change."""

    def __init__(self, objects: Mapping[str, Sequence[Json]], version: int = 1000) -> None:
        """*objects* by the plural of their resource. *version*: the resource version before the first."""
        self.lock = threading.Condition(threading.RLock())
        self.version = version
        self.epoch = 0
        """Raised to close every watch."""
        self.watches = 0
        self.resources = {
            resource.plural: resource
            for resource in (
                Resource("/api/v1", "services", "Service"),
                Resource("/api/v1", "nodes", "Node"),
                Resource("/api/v1", "pods", "Pod"),
                Resource("/apis/discovery.k8s.io/v1", "endpointslices", "EndpointSlice"),
                Resource("/apis/networking.k8s.io/v1", "servicecidrs", "ServiceCIDR"),
                Resource("/apis/networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
            )
        }
        for plural, items in objects.items():
            for obj in items:
                self.version += 1
                resource = self.resources[plural]
                resource.items[key_of(obj)] = Entry(resource.kind, obj, self.version)
        for resource in self.resources.values():
            resource.forgotten = self.version

    def resource_of(self, obj: Mapping[str, Any]) -> Resource:
        """Return the resource of an object's kind. Raises ApiError."""
        for resource in self.resources.values():
            if resource.kind == obj.get("kind"):
                return resource
        raise ApiError(400, "BadRequest", f"unknown kind {obj.get('kind')}")

    def apply(self, obj: Json) -> tuple[int, float]:
        """Create or replace *obj*, which the store keeps; return its version and the time of the change."""
        resource = self.resource_of(obj)
        with self.lock:
            now = time.monotonic()
            self.version += 1
            old = resource.items.get(key_of(obj))
            entry = resource.items[key_of(obj)] = Entry(resource.kind, obj, self.version)
            self._record(resource, Event(self.version, "MODIFIED" if old else "ADDED", entry, old))
            return self.version, now

    def remove(self, obj: Mapping[str, Any]) -> float:
        """Delete the object with kind and metadata of *obj*; return when. Raises KeyError."""
        resource = self.resource_of(obj)
        with self.lock:
            now = time.monotonic()
            old = resource.items.pop(key_of(obj))
            self.version += 1
            last = Entry(old.kind, {**old.obj, "metadata": dict(old.obj["metadata"])}, self.version)
            self._record(resource, Event(self.version, "DELETED", last, old))
            return now

    def _record(self, resource: Resource, event: Event) -> None:
        resource.history.append(event)
        while len(resource.history) > _HISTORY:
            resource.forgotten = resource.history.popleft().version
        self.lock.notify_all()

    def change_endpoints(self, operation: Mapping[str, Any]) -> float:
        """Give an EndpointSlice other addresses, and return when.

        ``{"slice": "ns/name", "index": 0, "address": "10.192.0.1"}`` changes one endpoint, ``{"slice": ...,
        "addresses": [...]}`` all of them. Raises ApiError.
        """
        namespace, _, name = operation["slice"].partition("/")
        with self.lock:
            old = self.resources["endpointslices"].items.get((namespace, name))
            if old is None:
                raise ApiError(404, "NotFound", f"no EndpointSlice {operation['slice']}")
            obj = dict(old.obj)
            obj.setdefault("kind", "EndpointSlice")
            meta = obj["metadata"] = dict(obj["metadata"])
            meta["generation"] = meta.get("generation", 1) + 1
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            meta["annotations"] = {**(meta.get("annotations") or {}), _TRIGGER_TIME: stamp}
            endpoints = obj["endpoints"] = list(obj["endpoints"])
            if "addresses" in operation:
                obj["endpoints"] = [{**endpoints[0], "addresses": [a]} for a in operation["addresses"]]
            else:
                index = operation["index"]
                endpoints[index] = {**endpoints[index], "addresses": [operation["address"]]}
            return self.apply(obj)[1]

    def expire(self) -> None:
        """Forget the history and close the watches: their next request is answered with 410."""
        with self.lock:
            self.version += 1
            for resource in self.resources.values():
                resource.history.clear()
                resource.forgotten = self.version
            self.epoch += 1
            self.lock.notify_all()


class Churn(threading.Thread):
    """Changes endpoints at an even rate, and records when."""

    def __init__(self, store: Store, operations: Sequence[Mapping[str, Any]], rate: float) -> None:
        """*rate*: operations a second."""
        super().__init__(daemon=True)
        self._store = store
        self._operations = operations
        self._rate = rate
        self.times: list[float] = []
        self.is_done = False

    def run(self) -> None:
        start = time.monotonic()
        for number, operation in enumerate(self._operations):
            time.sleep(max(0.0, start + number / self._rate - time.monotonic()))
            self.times.append(self._store.change_endpoints(operation))
        self.is_done = True
