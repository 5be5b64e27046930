"""Events for the cluster's operators (events.k8s.io/v1), delivered in the background."""

import json
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from msgspec import Struct

from kproxy_core.kube.access import AccessError, CurrentAccess
from kproxy_core.kube.requests import MAX_REFUSAL, ApiRequest, Observe
from kproxy_core.kube.transport import ProtocolError, Transport
from kproxy_core.model.service import ServiceName
from kproxy_core.model.timing import TokenBucket

# Events for the cluster's operators, delivered in the background.
#
# An event that can't be delivered is dropped; nothing waits for it, and nothing fails with it.

log = logging.getLogger("kproxy.run")

SAME_AGAIN = 600.0
"""Seconds before the same event about the same object is sent again."""

_BURST = 25
_REFILL = 12.0
"""Events that may be sent at once, and the seconds after which one more may."""

_TRIES = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds to wait before each attempt."""

_AT_THE_END = 2.0
"""Timeout in seconds for the last events when the process ends."""


class Event(Struct, frozen=True):
    """An event of events.k8s.io/v1."""

    type: str
    """``Normal`` or ``Warning``."""
    reason: str
    action: str
    kind: str
    """Kind, name and namespace of the object that the event is about."""
    name: str
    namespace: str = ""
    note: str = ""


class NotWritten(Exception):
    """The server did not accept the event. `again`: it may do so later."""

    def __init__(self, problem: str, again: bool) -> None:
        super().__init__(problem)
        self.again = again


Write = Callable[[Event, int], None]
"""Delivers an event, with its time in nanoseconds since the epoch. Raises NotWritten."""


class EventRecorder:
    """Sends events about one node and its Services. All methods may be called from any thread."""

    def __init__(
        self, node_name: str, write: Write | None, *,
        clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """*write* delivers the events; None: there is no API server, and they are dropped."""
        self._node_name = node_name
        self._write = write
        self._clock = clock
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._sent: dict[Event, float] = {}
        self._tokens = TokenBucket(_REFILL, _BURST)
        self._queue: SimpleQueue[tuple[Event, int] | None] = SimpleQueue()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def report_node(self, type_: str, reason: str, note: str = "") -> None:
        """Report an event of the proxy as a whole. *type_*: ``Normal`` or ``Warning``."""
        self._record(Event(type_, reason, "StartKubeProxy", "Node", self._node_name, note=note))

    def report_service(self, reason: str, service: ServiceName, note: str) -> None:
        """Report that *service* can't be served as its spec demands."""
        self._record(Event("Warning", reason, "Listen", "Service", service.name, service.namespace, note))

    def start(self) -> None:
        """Start delivering; until then events wait."""
        with self._lock:
            if self._write is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._deliver, args=(self._write,), name="events", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Deliver the events that wait if that is quick, and end."""
        if not self._queue.empty():
            self.start()
        self._ending.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_AT_THE_END)

    def _record(self, event: Event) -> None:
        if self._write is None:
            return
        with self._lock:
            now = self._clock()
            self._sent = {sent: at for sent, at in self._sent.items() if now - at < SAME_AGAIN}
            if event not in self._sent and self._tokens.try_take(now):
                self._sent[event] = now
                self._queue.put((event, self._wall_ns()))

    def _deliver(self, write: Write) -> None:
        while (waiting := self._queue.get()) is not None:
            event, happened = waiting
            for delay in _TRIES:
                if delay and self._ending.wait(delay):
                    break
                try:
                    write(event, happened)
                    break
                except NotWritten as error:
                    log.debug("event refused by the API server", extra={
                        "fields": {"reason": event.reason, "error": str(error)}})
                    if not error.again:
                        break
                except Exception:  # reporting a problem must not cause one
                    log.exception("bug: event not written")
                    break


# Events for the cluster's operators: events.k8s.io/v1, written to the API server.

_CONTROLLER = "kube-proxy"
"""The name that operators look for: any service proxy reports under it."""

_MAX_NOTE, _MAX_NAME = 1024, 253
"""Limits of the API server in bytes: with a longer one it refuses the whole event."""

_SILENCE = 10.0
"""Seconds without a byte after which the answer is given up."""


def write_event(access: CurrentAccess, host: str, observe: Observe, event: Event, happened: int) -> None:
    """Write *event* of the time *happened*, in nanoseconds since the epoch, to the API server of *access*.

    It is sent on a connection of its own: events are rare. *host*: this machine's name, the reporter of the
    event. *observe* is called for the request. Raises NotWritten. Not for several threads at a time.
    """
    namespace = event.namespace or "default"
    body = json.dumps(_document(event, namespace, happened, host)).encode()
    try:
        status, answer = _post(access, observe, f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", body)
    except (OSError, AccessError, ProtocolError) as error:
        raise NotWritten(str(error), again=True) from error
    if status >= 300:
        again = status >= 500 or status in (401, 429)
        raise NotWritten(f"{status} {answer[:200].decode(errors='replace')}", again)


def _post(current: CurrentAccess, observe: Observe, target: str, body: bytes) -> tuple[int, bytes]:
    current.keep_up()
    access = current.now
    transport = Transport(access)
    started, code, received = time.monotonic(), "<error>", None
    try:
        response = transport.post(target, body, _SILENCE)
        answer = response.read_all(MAX_REFUSAL)
        code, received = str(response.status), len(answer)
    finally:
        transport.close()
        observe(ApiRequest(
            access.authority, code, 0.0, time.monotonic() - started, received, "POST", len(body)))
    if response.status == 401:
        current.renew(access)
    return response.status, answer


def _document(event: Event, namespace: str, happened: int, host: str) -> dict[str, object]:
    # As in kube-proxy, the uid is the name.
    regarding = {"kind": event.kind, "name": event.name, "uid": event.name}
    if event.namespace:
        regarding |= {"namespace": event.namespace, "uid": f"{event.namespace}/{event.name}"}
    seconds, rest = divmod(happened, 1_000_000_000)
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": _name(event.name, f".{happened:x}"), "namespace": namespace},
        "eventTime": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:06d}Z",
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{host}",
        "type": event.type,
        "reason": event.reason,
        "action": event.action,
        "regarding": regarding,
        "note": event.note.encode()[:_MAX_NOTE].decode(errors="ignore"),
    }


def _name(regarding: str, suffix: str) -> str:
    """Return the name of an event, cut where that of the longest node leaves no room for *suffix*."""
    return regarding[:_MAX_NAME - len(suffix)].rstrip(".-") + suffix
