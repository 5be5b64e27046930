"""HTTP of the API server: LIST, WATCH, watch-list, bookmarks and 410, and control endpoints for
measurements.

  GET  /api/v1/services, /api/v1/nodes, /api/v1/pods (in JSON only),
       /apis/discovery.k8s.io/v1/endpointslices,
       /apis/networking.k8s.io/v1/servicecidrs,
       /apis/networking.k8s.io/v1/networkpolicies (in JSON only)
                                                 LIST and WATCH (also below /namespaces/NS/, and with a name)
  GET  /api/v1/namespaces/NS/pods/POD/exec       a websocket, if the server knows how to run commands
  POST any .../events                            accepted; see /bench/events

They are answered in protobuf where the Accept header names it first, else in JSON; without managed fields
where the first type has ``drop=metadata.managedFields`` (KEP-5958).

LIST knows limit/continue, resourceVersion (0 ignores limit, as the watch cache of a real server does),
labelSelector and fieldSelector. WATCH knows resourceVersion, timeoutSeconds, bookmarks, 410 for a version
that is too old, and sendInitialEvents (without `watch_list` it answers 422, as an old server does).

  GET  /bench/info       counts, resourceVersion, the number of open watches
  GET  /bench/events     {"events": [..]}: the last ones that clients reported in JSON
  POST /bench/apply      body = one object: create or replace it
  POST /bench/delete     {"resource": "services", "namespace": .., "name": ..}
  POST /bench/set        {"ops": [OP, ...]}            see `Store.change_endpoints`
  POST /bench/churn      {"ops": [OP, ...], "rate": K} K OPs a second, from now on
  GET  /bench/churn      {"done": bool, "times": [t, ...]}
  POST /bench/expire     forget the watch history and close the watches (-> 410)

Times are CLOCK_MONOTONIC seconds taken just before a watch can see the change, so that another process on
the same machine can subtract them.
"""

import base64
import json
import sys
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kproxy_conformance.apiserver.commands import Commands, Locate
from kproxy_conformance.apiserver.encoding import JSON, PROTOBUF, Encoding, WithoutManagedFields
from kproxy_conformance.apiserver.selectors import Selector
from kproxy_conformance.apiserver.store import (
    ApiError,
    Churn,
    Entry,
    Event,
    Json,
    Resource,
    Store,
    encode,
    key_of,
)

_TRUE = ("1", "true")
_POLLED = 0.05
"""Seconds between two looks at whether it must stop."""
_MOST_EVENTS = 1000
_BLOCK = 262_144
"""Bytes of initial events in one chunk."""


class Server(ThreadingHTTPServer):
    """An API server on *address*, in the namespace of the thread that makes it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], store: Store, *, watch_list: bool = True,
        drop_managed_fields: bool = True, bookmark_interval: float = 60.0, verbose: bool = False,
        locate: Locate | None = None,
    ) -> None:  # fmt: skip
        """*locate*: where commands in pods run; None: nowhere."""
        super().__init__(address, _Handler)
        self.store = store
        self.watch_list = watch_list
        self.drop_managed_fields = drop_managed_fields
        self.bookmark_interval = bookmark_interval
        self.verbose = verbose
        self.churn: Churn | None = None
        self.commands = Commands(locate) if locate is not None else None
        self.refused: set[tuple[str, str]] = set()
        """Verbs and resources, such as ``("create", "pods/exec")``, that no client may use."""
        self.authorized: set[tuple[str, str, str]] = set()
        """The verb, resource and namespace ("": none) of every request that was allowed."""
        self.stalled = ""
        """See `stall`."""
        self.events: deque[Json] = deque(maxlen=_MOST_EVENTS)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve_forever, args=(_POLLED,), name="apiserver", daemon=True).start()

    def stall(self, address: str) -> None:
        """Deliver no event of any watch to the client at *address* from now on; "": to all clients again."""
        with self.store.lock:
            self.stalled = address
            self.store.lock.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless it is that a client has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.store.expire()
        if self.commands is not None:
            self.commands.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    @property
    def _store(self) -> Store:
        return self.server.store

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        if self.server.verbose:
            sys.stderr.write(f"{time.monotonic():.3f} {format % args}\n")

    def do_GET(self) -> None:
        self._guard(self._get)

    def do_POST(self) -> None:
        self._guard(self._post)

    def do_PATCH(self) -> None:
        self._guard(self._post)

    def do_PUT(self) -> None:
        self._guard(self._post)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ApiError as error:
            self._answer(error.code, self._encoding.status(error.body), self._encoding)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    @property
    def _encoding(self) -> Encoding:
        first = (self.headers.get("Accept") or "").partition(",")[0]
        is_protobuf = first.startswith(PROTOBUF.content_type) and not self.path.startswith("/bench/")
        encoding = PROTOBUF if is_protobuf else JSON
        drops = self.server.drop_managed_fields and "drop=metadata.managedFields" in first.split(";")
        return WithoutManagedFields(encoding) if drops else encoding

    def _answer(self, code: int, body: object, encoding: Encoding = JSON) -> None:
        data = body if isinstance(body, bytes) else encode(body)
        self.send_response(code)
        self.send_header("Content-Type", encoding.content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # Reading

    def _find(self, path: str) -> tuple[Resource, str | None, str | None]:
        """Return resource, namespace and name. Raises ApiError."""
        for resource in self._store.resources.values():
            if not path.startswith(f"{resource.prefix}/"):
                continue
            parts = path[len(resource.prefix) + 1 :].strip("/").split("/")
            namespace = None
            if parts[0] == "namespaces" and len(parts) > 2:
                namespace, parts = parts[1], parts[2:]
            if parts[0] == resource.plural and len(parts) <= 2:
                return resource, namespace, parts[1] if len(parts) == 2 else None
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def _get(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {k: v[-1] for k, v in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()}
        if url.path in ("/healthz", "/readyz", "/livez"):
            return self._answer(200, b"ok")
        if url.path == "/version":
            return self._answer(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
        if url.path == "/bench/info":
            with self._store.lock:
                counts = {r.plural: len(r.items) for r in self._store.resources.values()}
                versions = {"resourceVersion": self._store.version, "watches": self._store.watches}
            return self._answer(200, versions | counts)
        if url.path == "/bench/events":
            return self._answer(200, {"events": list(self.server.events)})
        if url.path == "/bench/churn":
            churn = self.server.churn
            times = list(churn.times) if churn else []
            return self._answer(200, {"done": churn is None or churn.is_done, "times": times})
        if url.path.endswith("/exec"):
            return self._exec(url)
        resource, namespace, name = self._find(url.path)
        is_watch = query.get("watch") in _TRUE
        self._authorize("watch" if is_watch else "get" if name else "list", resource.plural, namespace)
        if is_watch:
            return self._watch(resource, query, Selector(query, namespace, name))
        if not name:
            return self._list(resource, query, Selector(query, namespace))
        with self._store.lock:
            entry = resource.items.get((namespace or "", name))
        if entry is None:
            raise ApiError(404, "NotFound", f'{resource.plural} "{name}" not found')
        return self._answer(200, resource.full(entry))

    def _authorize(self, verb: str, resource: str, namespace: str | None) -> None:
        """Raise the ApiError of RBAC if the test refuses this."""
        if (verb, resource) in self.server.refused:
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            what = resource.partition("/")[0]
            raise ApiError(
                403, "Forbidden",
                f'{what} is forbidden: User "tester" cannot {verb} resource "{resource}" in API group "" '
                f"{where}")
        self.server.authorized.add((verb, resource, namespace or ""))

    def _exec(self, url: urllib.parse.SplitResult) -> None:
        """Run a command in a pod, for which a user needs ``get`` and ``create`` (KEP-4006)."""
        query = urllib.parse.parse_qs(url.query)
        resource, namespace, name = self._find(url.path.removesuffix("/exec"))
        for verb in ("get", "create"):
            self._authorize(verb, f"{resource.plural}/exec", namespace)
        with self._store.lock:
            pod = resource.items.get((namespace or "", name or ""))
        if pod is None or self.server.commands is None:
            raise ApiError(404, "NotFound", f'{resource.plural} "{name}" not found')
        self.close_connection = True
        self.server.commands.serve(
            self.connection, self.headers.items(), self.path, pod.obj, query.get("command", []))

    def _list(self, resource: Resource, query: Mapping[str, str], selector: Selector) -> None:
        limit = int(query.get("limit") or 0)
        start: tuple[str, ...] | None = None
        with self._store.lock:
            version = self._store.version
            if query.get("continue"):
                version, start = _continued(query["continue"])
                if version < resource.forgotten:
                    raise ApiError(410, "Expired", "The provided continue parameter is too old")
            elif query.get("resourceVersion") == "0":
                limit = 0
            if limit or start:
                keys = sorted(key for key in resource.items if start is None or key > start)
                entries = [resource.items[key] for key in keys]
            else:
                entries = list(resource.items.values())
        entries = [entry for entry in entries if selector(entry.obj)]
        meta: dict[str, Any] = {"resourceVersion": str(version)}
        if limit and len(entries) > limit:
            token = encode({"rv": version, "start": key_of(entries[limit - 1].obj)})
            meta |= {
                "continue": base64.urlsafe_b64encode(token).decode(),
                "remainingItemCount": len(entries) - limit,
            }
            entries = entries[:limit]
        self._answer(200, self._encoding.list(resource, meta, entries), self._encoding)

    # Watching

    def _watch(self, resource: Resource, query: Mapping[str, str], selector: Selector) -> None:
        if "sendInitialEvents" in query and not self.server.watch_list:
            raise ApiError(
                422, "Invalid",
                'ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is '
                "forbidden for watch unless the WatchList feature gate is enabled",
            )  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Type", self._encoding.watch_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self._store.lock:
            self._store.watches += 1
        try:
            for lines in self._watched(resource, query, selector):
                self._chunk(lines)
            self._chunk(b"")
        finally:
            with self._store.lock:
                self._store.watches -= 1

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _watched(self, resource: Resource, query: Mapping[str, str], selector: Selector) -> Iterator[bytes]:
        """Yield the events of a watch, encoded, until it ends."""
        store, encoding = self._store, self._encoding
        initial = query.get("sendInitialEvents") in _TRUE
        bookmarks = query.get("allowWatchBookmarks") in _TRUE
        version = query.get("resourceVersion") or "0"
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        next_bookmark = time.monotonic() + self.server.bookmark_interval
        snapshot: list[Entry] = []
        with store.lock:
            epoch = store.epoch
            if initial or version == "0":
                seen, snapshot = store.version, list(resource.items.values())
            elif int(version) < resource.forgotten:
                too_old = f"too old resource version: {version} ({resource.forgotten})"
                yield encoding.error(ApiError(410, "Expired", too_old).body)
                return
            else:
                seen = int(version)
        added = (encoding.event("ADDED", resource, entry) for entry in snapshot if selector(entry.obj))
        yield from _blocks(added)
        if initial and bookmarks:
            yield encoding.bookmark(resource, _bookmark(resource, seen, is_initial=True))
        while True:
            with store.lock:
                until = min(deadline, next_bookmark)
                while self._is_stalled or not (resource.history and resource.history[-1].version > seen):
                    now = time.monotonic()
                    if store.epoch != epoch or now >= until:
                        break
                    store.lock.wait(until - now)
                if store.epoch != epoch or time.monotonic() >= deadline:
                    return
                if self._is_stalled:
                    next_bookmark = time.monotonic() + self.server.bookmark_interval
                    continue
                events = _after(resource, seen)
                seen = events[-1].version if events else store.version
            lines = b"".join(_seen(encoding, resource, event, selector) for event in events)
            if not events and time.monotonic() >= next_bookmark:
                next_bookmark = time.monotonic() + self.server.bookmark_interval
                if bookmarks:
                    lines += encoding.bookmark(resource, _bookmark(resource, seen))
            if lines:
                yield lines

    @property
    def _is_stalled(self) -> bool:
        return self.client_address[0] == self.server.stalled

    # Writing

    def _post(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.urlsplit(self.path).path
        if "/events" in path:
            accepted = {"kind": "Event", "apiVersion": "events.k8s.io/v1", "metadata": {"name": "accepted"}}
            is_json = "json" in (self.headers.get("Content-Type") or "")
            if is_json:
                self.server.events.append(json.loads(data))
            return self._answer(201, data if is_json else accepted)
        if not path.startswith("/bench/"):
            raise ApiError(405, "MethodNotAllowed", "this server is read-only")
        return self._answer(200, self._control(path, json.loads(data or b"{}")))

    def _control(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        store = self._store
        if path == "/bench/set":
            return {"times": [store.change_endpoints(operation) for operation in body["ops"]]}
        if path == "/bench/churn":
            self.server.churn = Churn(store, body["ops"], float(body["rate"]))
            self.server.churn.start()
            return {}
        if path == "/bench/apply":
            version, when = store.apply(body)
            return {"time": when, "resourceVersion": version}
        if path == "/bench/delete":
            kind = store.resources[body["resource"]].kind
            meta = {"namespace": body.get("namespace", ""), "name": body["name"]}
            try:
                return {"time": store.remove({"kind": kind, "metadata": meta})}
            except KeyError:
                raise ApiError(404, "NotFound", f"{body['resource']} {meta} not found") from None
        if path == "/bench/expire":
            store.expire()
            return {}
        raise ApiError(404, "NotFound", path)


def _continued(token: str) -> tuple[int, tuple[str, ...]]:
    try:
        found = json.loads(base64.urlsafe_b64decode(token))
        return found["rv"], tuple(found["start"])
    except (ValueError, KeyError) as error:
        raise ApiError(400, "BadRequest", "continue key is not valid") from error


def _seen(encoding: Encoding, resource: Resource, event: Event, selector: Selector) -> bytes:
    """Return *event* as a watch with *selector* sees it."""
    is_selected = event.kind != "DELETED" and selector(event.entry.obj)
    was_selected = event.old is not None and selector(event.old.obj)
    if is_selected:
        return encoding.event("MODIFIED" if was_selected else "ADDED", resource, event.entry)
    return encoding.event("DELETED", resource, event.entry) if was_selected else b""


def _after(resource: Resource, version: int) -> list[Event]:
    found = []
    for event in reversed(resource.history):
        if event.version <= version:
            break
        found.append(event)
    return found[::-1]


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    block, size = [], 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size > _BLOCK:
            yield b"".join(block)
            block, size = [], 0
    if block:
        yield b"".join(block)


def _bookmark(resource: Resource, version: int, *, is_initial: bool = False) -> Json:
    meta: dict[str, Any] = {"resourceVersion": str(version), "creationTimestamp": None}
    if is_initial:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    obj: Json = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}
    if resource.kind == "EndpointSlice":
        obj |= {"addressType": "", "endpoints": None, "ports": None}
    return obj
