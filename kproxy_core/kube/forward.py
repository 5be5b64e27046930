"""Forwards, which only manifests have: what this machine forwards, in a few lines.

    apiVersion: kproxy.dev/v1
    kind: Forward
    name: web
    listen: ["203.0.113.20:443", "node:8443"]
    to: ["10.0.0.11:8443", "10.0.0.12:8443 weight=2"]
    check: {tcp: 2s}

A Forward stands for a Service without a ClusterIP and for its EndpointSlices. What it listens at is served
as load balancer IPs and node ports are, so that endpoints see an address of this node, to which they answer
whatever their routes are. A ClusterIP would be wrong there: its other ports are refused, even if the address
is one of this machine's.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from msgspec import Struct, field

from kproxy_core.kube.reading import (
    MAX_DESTINATIONS,
    MAX_ENDPOINTS,
    FieldError,
    FieldErrors,
    Reading,
    checked_address,
    checked_label,
    quoted,
)
from kproxy_core.model.address import Address, Family, Protocol, family_of, format_socket
from kproxy_core.model.duration import Duration
from kproxy_core.model.events import ServiceSet, SliceSet
from kproxy_core.model.service import (
    DEFAULT_WEIGHT,
    Check,
    Destination,
    Endpoint,
    EndpointSlice,
    PortSpec,
    Service,
    ServiceName,
    SliceName,
    SlicePort,
)

NAMESPACE = "Forward"
"""Namespace of the objects of Forwards. None in Kubernetes has a capital letter."""

NODE = "node"
"""Instead of an address: the node's own, as for a node port."""

EVERY = Duration(2)
"""Time between two checks over HTTP, by default."""
_SHORTEST, _LONGEST = Duration(0.1), Duration(3600)

T = TypeVar("T")

_SOCKET = r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:\[\]\s]+)):(?P<port>\d{1,5})"
_LISTEN = re.compile(rf"{_SOCKET}(?:/(?P<protocol>tcp|udp))?", re.ASCII)
_TO = re.compile(rf"{_SOCKET}(?:\s+weight=(?P<weight>\d{{1,5}}))?", re.ASCII)
_PATH = re.compile(r"/[!-~]{0,1023}")

Objects = tuple[ServiceSet | SliceSet, ...]
"""The Service, then its EndpointSlices."""


class WireCheck(Struct, frozen=True, forbid_unknown_fields=True):
    tcp: str | None = None
    http: str | None = None
    every: str | None = None


class WireForward(Struct, frozen=True, forbid_unknown_fields=True):
    """A Forward as it is written. A field that is not one of these is a mistake."""

    api_version: str = field(name="apiVersion")
    kind: str
    name: str | None = None
    listen: list[str] = []
    to: list[str] = []
    check: WireCheck | None = None

    @property
    def metadata(self) -> None:
        """It has none."""


class _Listen(NamedTuple):
    address: Address | None
    """None: the node's own addresses."""
    port: int
    protocol: Protocol


class _To(NamedTuple):
    where: Destination
    weight: int

    @property
    def family(self) -> Family:
        return family_of(self.where.address)


def read_forward(obj: WireForward) -> Reading[Objects]:
    """Read *obj*. A Forward with a mistake is refused as a whole, and each mistake is reported."""
    found = FieldErrors()
    try:
        name = checked_label(obj.name, "name")
    except FieldError as refused:
        return Reading(None, None, FieldErrors([refused]).bad("Forward", None, obj.name))
    listens = _each(obj.listen, "listen", _listen, found)
    endpoints = _each(obj.to, "to", _to, found)
    check = None
    try:
        check = _check(obj.check) if obj.check is not None else None
    except FieldError as refused:
        found.append(refused)
    if not found:
        found.extend(_contradictions(listens, endpoints))
    if found:
        return Reading(("", name), None, found.bad("Forward", None, name))
    return Reading(("", name), tuple(_objects(name, listens, endpoints, check)))


# From text to values.

def _each(
    texts: Sequence[str], path: str, read: Callable[[str, str], T], found: FieldErrors
) -> list[T]:
    kept: list[T] = []
    if not texts:
        found.add(path, "is missing")
    if len(texts) > MAX_ENDPOINTS:
        found.add(path, f"{len(texts)} entries; at most {MAX_ENDPOINTS} are served")
        return kept
    for i, text in enumerate(texts):
        try:
            value = read(text, f"{path}[{i}]")
        except FieldError as refused:
            found.append(refused)
            continue
        if value in kept:
            found.add(f"{path}[{i}]", f"{quoted(text)} is there twice")
        kept.append(value)
    return kept


def _listen(text: str, path: str) -> _Listen:
    match = _LISTEN.fullmatch(text)
    if match is None:
        raise FieldError(path, f"{quoted(text)} is not ADDRESS:PORT[/udp] or node:PORT[/udp]")
    address = None if match["host"] == NODE else _address(match, path)
    return _Listen(address, _port(match, path), Protocol[(match["protocol"] or "tcp").upper()])


def _to(text: str, path: str) -> _To:
    match = _TO.fullmatch(text)
    if match is None:
        raise FieldError(path, f"{quoted(text)} is not ADDRESS:PORT or ADDRESS:PORT weight=NUMBER")
    weight = int(match["weight"] or 1)
    if weight > DEFAULT_WEIGHT:
        raise FieldError(path, f"{weight} is not a weight (0 to {DEFAULT_WEIGHT})")
    return _To(Destination(_address(match, path), _port(match, path)), weight)


def _address(match: re.Match[str], path: str) -> Address:
    address = checked_address(match["v6"] or match["host"], "{}", path)
    if (match["v6"] is None) is not (len(address) == Family.IPV4.size):
        raise FieldError(path, f"{quoted(match[0])}: brackets are for IPv6 addresses")
    return address


def _port(match: re.Match[str], path: str) -> int:
    port = int(match["port"])
    if not 0 < port < 65536:
        raise FieldError(path, f"{port} is not a port (1 to 65535)")
    return port


def _check(given: WireCheck) -> Check:
    if (given.tcp is None) is (given.http is None):
        raise FieldError("check", "is not one of {tcp: 2s} and {http: /PATH, every: 2s}")
    if given.tcp is not None:
        if given.every is not None:
            raise FieldError("check.every", "is only for http; the time between checks by tcp is its value")
        return Check(_interval(given.tcp, "check.tcp"))
    if not _PATH.fullmatch(given.http or ""):
        raise FieldError("check.http", f"{quoted(given.http)} is not a path such as /healthz")
    return Check(EVERY if given.every is None else _interval(given.every, "check.every"), given.http or "")


def _interval(text: str, path: str) -> Duration:
    with suppress(ValueError):
        interval = Duration.parse(text)
        if _SHORTEST <= interval <= _LONGEST:
            return interval
    raise FieldError(path, f"{quoted(text)} is not a duration from {_SHORTEST} to {_LONGEST}")


def _contradictions(listens: Sequence[_Listen], endpoints: Sequence[_To]) -> Iterator[FieldError]:
    """Yield what the valid entries lack together."""
    served = {family_of(listen.address) for listen in listens if listen.address is not None}
    on_node = any(listen.address is None for listen in listens)
    reached = {to.family for to in endpoints}
    for i, listen in enumerate(listens):
        if listen.address is not None and family_of(listen.address) not in reached:
            yield FieldError(f"listen[{i}]", f"no endpoint in `to` is {family_of(listen.address).label}")
    known: set[Destination] = set()
    for i, to in enumerate(endpoints):
        if to.family not in served and not on_node:
            yield FieldError(f"to[{i}]", f"nothing in `listen` is {to.family.label}")
        if to.where in known:
            yield FieldError(f"to[{i}]", f"{format_socket(*to.where)} is there twice")
        known.add(to.where)
    for family in sorted(reached, key=list(Family).index):
        if not any(to.weight for to in endpoints if to.family is family):
            yield FieldError("to", f"every {family.label} endpoint has weight 0")
    if len(listens) * len(endpoints) > MAX_DESTINATIONS:
        yield FieldError("to", f"{len(endpoints)} of them with {len(listens)} in `listen` are too many")


# From values to objects.

def _objects(
    name: str, listens: Iterable[_Listen], endpoints: Sequence[_To], check: Check | None
) -> Iterator[ServiceSet | SliceSet]:
    """Yield the Service, and an EndpointSlice for each family, port of endpoints and weight."""
    ports = _ports(listens)
    service = ServiceName(NAMESPACE, name)
    yield ServiceSet(Service(name=service, ports=ports, cluster_ips=()))
    are_weighted = len({to.weight for to in endpoints}) > 1
    alike: dict[tuple[Family, int, int | None], list[Endpoint]] = {}
    for to in endpoints:
        key = to.family, to.where.port, to.weight if are_weighted else None
        alike.setdefault(key, []).append(Endpoint(to.where.address))
    for (family, number, weight), members in alike.items():
        suffix = "" if weight is None else f":{weight}"
        yield SliceSet(EndpointSlice(
            SliceName(NAMESPACE, f"{name}:{family.label}:{number}{suffix}"), service, family,
            tuple(SlicePort(port.name, port.protocol, number) for port in ports), tuple(members), weight,
        ), check=check)  # fmt: skip


def _ports(listens: Iterable[_Listen]) -> tuple[PortSpec, ...]:
    """Return a port for each number and protocol, named by its number."""
    alike: dict[tuple[int, Protocol], list[Address | None]] = {}
    for listen in listens:
        alike.setdefault((listen.port, listen.protocol), []).append(listen.address)
    return tuple(
        PortSpec(str(port), protocol, port, port if None in at else 0, tuple(a for a in at if a is not None))
        for (port, protocol), at in alike.items()
    )
