"""The orders and questions to relay workers, and their answers. Pure."""

from typing import NamedTuple

Endpoint = tuple[str, int]
"""Address as text, and port: the argument of connect(2)."""

Dialled = tuple[bytes | None, int, int]
"""Address, protocol and port of a `Frontend`, of the types that marshal accepts."""


class WorkerSettings(NamedTuple):
    """Arguments of every worker, as seconds."""

    udp_idle: float
    drain: float
    """Time limit for connections to a removed endpoint; negative: none."""
    half_closed: float
    """Time after which a connection that is half-closed and idle is reset."""


class Serve(NamedTuple):
    """An order to listen for a service port, or to serve it from other endpoints."""

    relay: int
    """The relay's number, chosen by the proxy."""
    service_port: int
    """The number of its service port. Relays of the same one share the clients' endpoints."""
    udp: bool
    address: str
    """The local address to listen on, which also determines the family."""
    port: int
    endpoints: tuple[Endpoint, ...]
    affinity_seconds: int
    frontend: Dialled | None = None
    """Count connections for this frontend; see `Count`. None: count none."""
    resting: tuple[Endpoint, ...] = ()
    """Endpoints that get no new connections and keep those that they have."""
    hash_by: str = ""
    """``client`` or ``flow``: what selects one of `endpoints`, which are slots; "": they take turns."""


class ReportCounts(NamedTuple):
    """A request for the connections that were counted since the last one."""


class Recall(NamedTuple):
    """A request for the endpoints of a client's affinity, by relay."""

    client: str


class ReportConnected(NamedTuple):
    """A request for relays and endpoints that have open TCP connections between them, closed relays
    included."""


class Reset(NamedTuple):
    """An order to reset the connections of a relay to some endpoints, answered by their number."""

    relay: int
    endpoints: tuple[Endpoint, ...]


class Count(NamedTuple):
    """Connections to one endpoint."""

    frontend: Dialled
    endpoint: Endpoint
    numbers: tuple[int, ...]
    """Number of connections, of those that failed by `Failure`, and of handshakes by `Handshake`."""


class Close(NamedTuple):
    """An order to stop listening for a service port."""

    relay: int
    endpoints_removed: bool
    """Its endpoints are removed too; otherwise another worker or mode accepts from now on."""


Order = Serve | Close
Question = ReportCounts | Recall | ReportConnected | Reset
Command = Order | Question
