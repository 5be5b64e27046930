"""The state that a source has delivered so far, for tests to wait on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kproxy_core.model.address import Cidr
from kproxy_core.model.events import (
    BadObject,
    Complete,
    Event,
    NodeGone,
    NodeSet,
    ServiceCidrGone,
    ServiceCidrSet,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
    Source,
)
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import EndpointSlice, Service, ServiceName, SliceName
from kproxy_core.model.timing import Backoff
from tests.patience import PATIENCE


def always(seconds: float) -> type[Backoff]:
    """Return a back-off with one delay."""
    class Always(Backoff):
        def delay(self, lasted: float = 0.0, asked: float = 0.0) -> float:
            return seconds

    return Always


class Observed:
    """The state that a source's events add up to; the `emit` of a test."""

    def __init__(self) -> None:
        self.services: dict[ServiceName, Service] = {}
        self.slices: dict[SliceName, EndpointSlice] = {}
        self.node: NodeObject | None = None
        self._cidrs: dict[str, tuple[Cidr, ...]] = {}
        self.complete: list[str] = []
        self.bad: list[BadObject] = []
        self.gone: list[ServiceName] = []
        """Services that were reported as gone, known or not."""
        self.events = 0
        self.batches = 0
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            assert events
            for event in events:
                self._fold(event)
            self.events += len(events)
            self.batches += 1
            self._changed.notify_all()

    @property
    def cidrs(self) -> tuple[Cidr, ...]:
        """The networks of all ServiceCIDRs."""
        return tuple(cidr for cidrs in self._cidrs.values() for cidr in cidrs)

    @property
    def names(self) -> set[str]:
        """The names of the Services."""
        return {name.name for name in self.services}

    def wait_for(self, what: Callable[["Observed"], object]) -> None:
        """Return as soon as *what* holds for the state, or for a server, of which no event tells."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while not what(self):
                assert time.monotonic() < deadline, f"never came true, with {vars(self)}"
                self._changed.wait(0.05)

    def _fold(self, event: Event) -> None:
        match event:
            case ServiceSet(service):
                self.services[service.name] = service
            case ServiceGone(name):
                self.gone.append(name)
                self.services.pop(name, None)
            case SliceSet(piece):
                self.slices[piece.name] = piece
            case SliceGone(slice_name):
                self.slices.pop(slice_name, None)
            case NodeSet(node):
                self.node = node
            case NodeGone():
                self.node = None
            case ServiceCidrSet(cidr_name, cidrs):
                self._cidrs[cidr_name] = cidrs
            case ServiceCidrGone(cidr_name):
                self._cidrs.pop(cidr_name, None)
            case Complete(source):
                self.complete.append(source)
            case BadObject():
                self.bad.append(event)


@contextmanager
def following(source: Source) -> Iterator[Observed]:
    """Run *source*. Yields the state that it delivers."""
    observed = Observed()
    before = threading.enumerate()
    source.start(observed)
    threads = [thread for thread in threading.enumerate() if thread not in before]
    try:
        yield observed
    finally:
        source.stop()
    told = observed.events
    assert not any(thread.is_alive() for thread in threads if thread.name.startswith("watch "))
    assert observed.events == told
