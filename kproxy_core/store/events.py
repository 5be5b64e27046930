"""What sources tell the store: typed events, already decoded and checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kproxy_core.model.address import Cidr
from kproxy_core.model.endpoint import EndpointSlice, SliceName
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import Service, ServiceName


@dataclass(frozen=True, slots=True)
class ServiceSet:
    """A Service that this proxy serves was added or changed."""

    service: Service


@dataclass(frozen=True, slots=True)
class ServiceGone:
    """A Service is gone, or is no longer this proxy's to serve."""

    name: ServiceName


@dataclass(frozen=True, slots=True)
class SliceSet:
    """An EndpointSlice was added or changed."""

    slice: EndpointSlice


@dataclass(frozen=True, slots=True)
class SliceGone:
    """An EndpointSlice is gone or can no longer be used."""

    name: SliceName


@dataclass(frozen=True, slots=True)
class NodeSet:
    """This node's Node object was added or changed."""

    node: NodeObject


@dataclass(frozen=True, slots=True)
class NodeGone:
    """This node's Node object was deleted."""


@dataclass(frozen=True, slots=True)
class ServiceCidrsSet:
    """The networks that ClusterIPs come from, all of them."""

    cidrs: tuple[Cidr, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Source *source* has delivered everything that existed when it started."""

    source: str


@dataclass(frozen=True, slots=True)
class BadObject:
    """An object, or part of one, could not be used; the rest is unaffected."""

    kind: str
    name: str
    """``namespace/name`` as far as known, or where it was found."""
    field: str
    """Path of the offending field, e.g. ``spec.ports[0].port``; "" for the whole object."""
    problem: str

    def __str__(self) -> str:
        where = f"{self.kind} {self.name}"
        return f"{where}: {self.field}: {self.problem}" if self.field else f"{where}: {self.problem}"


Event = (
    ServiceSet | ServiceGone | SliceSet | SliceGone | NodeSet | NodeGone | ServiceCidrsSet
    | Complete | BadObject
)

Emit = Callable[[list[Event]], None]
"""Hands a batch of events to the loop; may be called from any thread, never blocks for long."""


class Source(Protocol):
    """Something that delivers events from its own threads until it is stopped."""

    kinds: tuple[str, ...]
    """The names under which it will announce `Complete`."""

    def start(self, emit: Emit) -> None:
        """Begin delivering to *emit*; returns at once."""

    def stop(self) -> None:
        """Stop delivering; returns when no further event will come."""
