"""Endpoints and the EndpointSlices that carry them."""

from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from kproxy_core.model.address import Address, Family, Protocol, parse_address
from kproxy_core.model.service import ServiceName


class Endpoint(NamedTuple):
    """One address of an EndpointSlice, with the relevant conditions (absent ones filled in)."""

    address: Address
    node: str = ""
    """Name of the node it is on; "" if unknown."""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: frozenset[str] = frozenset()
    node_hints: frozenset[str] = frozenset()


class SlicePort(NamedTuple):
    """One port of an EndpointSlice that has a name (perhaps empty) and a number."""

    name: str
    protocol: Protocol
    port: int


class SliceName(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Destination(NamedTuple):
    """The address and port of an endpoint, at which a connection ends."""

    address: Address
    port: int

    @classmethod
    def parse(cls, text: str) -> "Destination":
        """Read ``address:port``, with IPv6 in brackets. Raises ValueError."""
        host, _, port = text.rpartition(":")
        return cls(parse_address(host.strip("[]")), int(port))


Candidate = tuple[Destination, Endpoint]
"""An endpoint of one service port, with its conditions."""

Row = tuple[bytes, Candidate]
"""A candidate after its address and port in network order, by which candidates are sorted."""


class EndpointSlice(Struct, frozen=True, dict=True):
    name: SliceName
    service: ServiceName
    family: Family
    ports: tuple[SlicePort, ...]
    endpoints: tuple[Endpoint, ...]

    @cached_property
    def rows(self) -> dict[tuple[str, Protocol], list[Row]]:
        """Results of planning derived from this slice, by name and protocol of a service port."""
        return {}
