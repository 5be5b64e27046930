"""The events that sources send to the store: typed, decoded and checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kproxy_core.model.address import Cidr
from kproxy_core.model.endpoint import EndpointSlice, SliceName
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import Service, ServiceName


@dataclass(frozen=True, slots=True)
class ServiceSet:
    """A Service for this proxy was added or changed."""

    service: Service
    origin: str = field(default="", compare=False)
    """The file or the resource version of the object, in words; "" if unknown."""


@dataclass(frozen=True, slots=True)
class ServiceGone:
    """A Service was deleted, or was given to another proxy."""

    name: ServiceName


@dataclass(frozen=True, slots=True)
class SliceSet:
    """An EndpointSlice was added or changed."""

    slice: EndpointSlice
    origin: str = field(default="", compare=False)
    """See `ServiceSet.origin`."""


@dataclass(frozen=True, slots=True)
class SliceGone:
    """An EndpointSlice was deleted or can no longer be used."""

    name: SliceName


@dataclass(frozen=True, slots=True)
class NodeSet:
    """This node's Node object was added or changed."""

    node: NodeObject


@dataclass(frozen=True, slots=True)
class NodeGone:
    """This node's Node object was deleted."""


@dataclass(frozen=True, slots=True)
class ServiceCidrSet:
    """A ServiceCIDR was added or changed."""

    name: str
    cidrs: tuple[Cidr, ...]


@dataclass(frozen=True, slots=True)
class ServiceCidrGone:
    name: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Source *source* has delivered everything that existed when it started."""

    source: str


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object, or part of one, could not be used; the rest is unaffected."""

    kind: str
    name: str
    """``namespace/name`` as far as known, else the file or line that holds it."""
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
    left = MOST_COMPLAINTS
    kept: list[E | BadObject] = []
    for event in events:
        left -= isinstance(event, BadObject)
        if left >= 0 or not isinstance(event, BadObject):
            kept.append(event)
    return kept if left >= 0 else [*kept, BadObject(kind, name, "", f"{-left} more problems")]


Emit = Callable[[list[Event]], None]
"""Passes a batch of events to the loop. Any thread may call it; it does not block."""


class Source(Protocol):
    """Delivers events from its own threads until it is stopped."""

    kinds: tuple[str, ...]
    """The names under which it announces `Complete`."""

    def start(self, emit: Emit) -> None:
        """Start delivering to *emit*, and return at once."""

    def stop(self) -> None:
        """Stop delivering. No event follows once this returns."""
