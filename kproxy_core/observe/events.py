"""Kubernetes events (events.k8s.io/v1) about this node and its Services, delivered in the background.

An event that can't be delivered is dropped; nothing waits for it, and nothing fails because of it.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from msgspec import Struct

from kproxy_core.model.service import ServiceName
from kproxy_core.model.timing import TokenBucket

log = logging.getLogger("kproxy.run")

SAME_AGAIN = 600.0
"""Minimum seconds between equal events about the same object."""

_BURST = 25
_REFILL = 12.0
"""Limit for events sent at once, and the seconds after which one more may be."""

_TRIES = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Delay in seconds before each attempt."""

_CONTROLLER = "kube-proxy"
"""The reporting controller: operators look for this name, whatever the service proxy."""

_MAX_NOTE, _MAX_NAME = 1024, 253
"""Limits of the API server in bytes: it refuses an event that exceeds them."""

_SILENCE = 10.0
"""Timeout in seconds for a silent answer."""

_AT_THE_END = 2.0
"""Timeout in seconds for the last events when the process ends."""


class ClusterEvent(Struct, frozen=True):
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


Write = Callable[[ClusterEvent, int], None]
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
        self._sent: dict[ClusterEvent, float] = {}
        self._tokens = TokenBucket(_REFILL, _BURST)
        self._queue: SimpleQueue[tuple[ClusterEvent, int] | None] = SimpleQueue()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def report_node(self, type_: str, reason: str, note: str = "") -> None:
        """Report an event of the proxy as a whole. *type_*: ``Normal`` or ``Warning``."""
        self._record(ClusterEvent(type_, reason, "StartKubeProxy", "Node", self._node_name, note=note))

    def report_service(self, reason: str, service: ServiceName, note: str, *, action: str = "Listen") -> None:
        """Report that *service* can't be served as its spec demands. *action*: what this proxy did."""
        self._record(
            ClusterEvent("Warning", reason, action, "Service", service.name, service.namespace, note))

    def start(self) -> None:
        """Start delivering; events are queued until then."""
        with self._lock:
            if self._write is not None and self._thread is None:
                self._thread = threading.Thread(
                    target=self._deliver, args=(self._write,), name="events", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Deliver the queued events if that is quick, and stop."""
        if not self._queue.empty():
            self.start()
        self._ending.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_AT_THE_END)

    def _record(self, event: ClusterEvent) -> None:
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
