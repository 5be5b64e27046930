"""The events that sources send to the store: typed, decoded and checked."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol, TypeVar

from msgspec import Struct

from kproxy_core.model.address import Cidr
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import Check, EndpointSlice, Service, ServiceName, SliceName


class ServiceSet(Struct, frozen=True, eq=False, gc=False):
    """A Service for this proxy was added or changed."""

    service: Service
    origin: str = ""
    """The file or the resource version of the object, in words; "" if unknown."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServiceSet) and self.service == other.service


class ServiceGone(Struct, frozen=True, gc=False):
    """A Service was deleted, or was given to another proxy."""

    name: ServiceName


class SliceSet(Struct, frozen=True, eq=False, gc=False):
    """An EndpointSlice was added or changed."""

    slice: EndpointSlice
    origin: str = ""
    """See `ServiceSet.origin`."""
    trigger_time: float | None = None
    """Time of the change that the slice reports (seconds since the epoch), from the
    annotation ``endpoints.kubernetes.io/last-change-trigger-time``."""
    check: Check | None = None
    """How its endpoints are checked; None: whoever made the slice knows which are ready."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceSet) and (self.slice, self.check) == (other.slice, other.check)


class SliceGone(Struct, frozen=True, gc=False):
    """An EndpointSlice was deleted or can no longer be used."""

    name: SliceName


class NodeSet(Struct, frozen=True, gc=False):
    """This node's Node object was added or changed."""

    node: NodeObject


class NodeGone(Struct, frozen=True, gc=False):
    """This node's Node object was deleted."""


class ServiceCidrSet(Struct, frozen=True, gc=False):
    """A ServiceCIDR was added or changed."""

    name: str
    cidrs: tuple[Cidr, ...]


class ServiceCidrGone(Struct, frozen=True, gc=False):
    name: str


class Complete(Struct, frozen=True, gc=False):
    """Source *source* has delivered everything that existed when it started."""

    source: str


class BadObject(Struct, frozen=True, gc=False):
    """An object, or part of one, could not be used; the rest is unaffected."""

    kind: str
    name: str
    """``namespace/name`` if known, else the file or line that holds it."""
    field: str
    """Path of the offending field, e.g. ``spec.ports[0].port``; "" for the whole object."""
    problem: str

    def __str__(self) -> str:
        where = f"{self.kind} {self.name}"
        return f"{where}: {self.field}: {self.problem}" if self.field else f"{where}: {self.problem}"


Event = (
    ServiceSet | ServiceGone | SliceSet | SliceGone | NodeSet | NodeGone | ServiceCidrSet
    | ServiceCidrGone | Complete | BadObject
)

MOST_COMPLAINTS = 100
"""Limit for the `BadObject` events of one file, or of one batch from the API server."""


E = TypeVar("E", bound=Event)


def limit_complaints(events: list[E], kind: str, name: str) -> list[E | BadObject]:
    """Return *events* with at most `MOST_COMPLAINTS` bad objects, and one that counts the rest.

    *kind* and *name* are for that one: each complaint costs the loop a line of the log.
    """
    numbers = count(1)
    kept = [each for each in events if not isinstance(each, BadObject) or next(numbers) <= MOST_COMPLAINTS]
    more = len(events) - len(kept)
    return [*kept, BadObject(kind, name, "", f"{more} more problems")] if more else [*kept]


Emit = Callable[[list[Event]], None]
"""Passes a batch of events to the loop. Any thread may call it; it does not block."""


class Source(Protocol):
    """Delivers events from its own threads until it is stopped."""

    kinds: tuple[str, ...]
    """The names of its `Complete` events."""

    def start(self, emit: Emit) -> None:
        """Start delivering to *emit*, and return at once."""

    def stop(self) -> None:
        """Stop delivering. No event follows once this returns."""

    def problems(self) -> Iterable[BadObject]:
        """Return what is not used now, or only in part. Any thread may call it."""
