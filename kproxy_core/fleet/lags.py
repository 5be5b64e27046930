"""What the kproxy of a node has not been told: its answers beside what the API server has. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kproxy_core.app.explain import slice_as_told
from kproxy_core.fleet.objects import ServiceState, SliceState
from kproxy_core.model.address import Address, Protocol, family_of
from kproxy_core.model.service import Destination, ServiceName, ServicePortKey
from kproxy_core.plan.service_plan import Frontend

Json = dict[str, Any]
"""Values that JSON can hold."""
Packet = Mapping[str, Any]
"""An answer of ``kproxy explain`` for one packet (`kproxy_core.app.explain.answer`)."""

SETTLED = 5.0
"""Seconds after which every node should have received a change."""
_MOST_DIFFERENCES = 3
"""In one sentence."""
_VERSION = "resource version "
"""An answer has this before a version (`kproxy_core.kube.reading.origin_of`), and another word for a file."""


class Answered(NamedTuple):
    """What the kproxy of one node says."""

    node: str
    packets: Sequence[Packet] = ()
    problem: str = ""
    """Why it says nothing."""


class ServiceObjects(NamedTuple):
    """A Service and its EndpointSlices, as the API server has them."""

    state: ServiceState
    slices: Sequence[SliceState]
    deleted: frozenset[str] = frozenset()
    """Names of slices that were deleted while the nodes were asked."""


Objects = Mapping[ServiceName, ServiceObjects]


class Problem(NamedTuple):
    """Something that is wrong."""

    what: str
    node: str
    """The node that shows it."""
    lags: bool = False
    """The node has not been told of a change, or did not take it in."""
    changed: float | None = None
    """Time of that change, in seconds since the epoch; None: unknown."""

    def is_under_way(self, now: float) -> bool:
        """Return whether the change may be too young to have reached every node."""
        return self.lags and self.changed is not None and now - self.changed < SETTLED

    def as_json(self, now: float) -> Json:
        seconds = None if self.changed is None else round(max(0.0, now - self.changed), 1)
        return {"node": self.node, "problem": self.what, "lags": self.lags, "seconds": seconds}


def lags(answered: Answered, objects: Objects, node_addresses: Collection[Address]) -> list[Problem]:
    """Return the differences between what a node knows of Services and what the API server has.

    *node_addresses*: of all nodes.
    """
    found: dict[Problem, None] = {}
    for packet in answered.packets:
        found |= dict.fromkeys(_lags_of(packet, answered.node, objects, node_addresses))
    return list(found)


def _lags_of(
    packet: Packet, node: str, objects: Objects, node_addresses: Collection[Address]
) -> Iterator[Problem]:
    frontend = packet["frontend"]
    if frontend is None:
        for found in objects.values():
            meta = found.state.meta
            if found.state.has(dialled(packet), node_addresses):
                where = f"{packet['to']}/{packet['protocol']}"
                yield Problem(f"does not know that {where} is of Service {meta.full_name}", node, True,
                              meta.changed or meta.created)
        return
    key = key_of(packet)
    if key.service not in objects:
        yield Problem(f"still serves Service {key.service}, which the API server does not have", node, True)
        return
    state, slices, deleted = objects[key.service]
    version, known = state.meta.resource_version, str(frontend["origin"])
    if known.startswith(_VERSION) and known != f"{_VERSION}{version}":
        yield Problem(f"knows {known} of Service {key.service}, and {version} is the newest", node, True,
                      state.meta.changed)
    if "slices" in packet:  # kproxy of an older release does not tell them.
        family = family_of(Destination.parse(packet["to"]).address)
        of_family = {each.slice.name.name: each for each in slices if each.slice.family is family}
        told = [piece for piece in packet["slices"] if piece["name"] not in deleted]
        yield from _lagging_slices(told, of_family, key, node)


def _lagging_slices(
    told: Sequence[Mapping[str, Any]], slices: Mapping[str, SliceState], key: ServicePortKey, node: str
) -> Iterator[Problem]:
    known = {piece["name"]: piece for piece in told}
    for name, state in slices.items():
        wanted = slice_as_told(state.slice, key)
        count = len(wanted["endpoints"])
        if name in known:
            differences = list(_differences(wanted, known[name]))
            if differences:
                yield Problem(f"knows an older EndpointSlice {name}: {joined(differences)}", node, True,
                              state.meta.changed)
        elif count:
            yield Problem(f"does not know EndpointSlice {name} ({count} endpoint{'s' * (count > 1)})", node,
                          True, state.meta.created)
    for name, piece in known.items():
        if name not in slices and piece["endpoints"]:
            yield Problem(f"still uses EndpointSlice {name}, which the API server does not have", node, True)


def joined(differences: Sequence[str]) -> str:
    """Return the first of *differences* in one sentence."""
    more = len(differences) - _MOST_DIFFERENCES
    return ", ".join(differences[:_MOST_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _differences(wanted: Json, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between a slice at the API server and as a node knows it."""
    if wanted["weight"] != known["weight"]:
        yield f"weight {_weight(known)} instead of {_weight(wanted)}"
    now = {each["endpoint"]: each for each in wanted["endpoints"]}
    then = {each["endpoint"]: each for each in known["endpoints"]}
    for endpoint, each in now.items():
        if endpoint not in then:
            yield f"without {endpoint}"
        elif each != then[endpoint]:
            before, after = condition(then[endpoint]), condition(each)
            yield f"{endpoint} " + (
                "with other hints or on another node" if before == after else f"{before} instead of {after}")
    yield from (f"with {endpoint}, which was removed" for endpoint in then if endpoint not in now)


def _weight(piece: Mapping[str, Any]) -> str:
    return "none" if piece["weight"] is None else str(piece["weight"])


def condition(endpoint: Mapping[str, Any]) -> str:
    """Return the readiness of an endpoint in words."""
    if endpoint["ready"]:
        return "ready"
    if endpoint["terminating"]:
        return "terminating, and serving" if endpoint["serving"] else "terminating"
    return "not ready"


def dialled(packet: Packet) -> Frontend:
    """Return the frontend that a packet dials, whether or not it is a Service's."""
    address, port = Destination.parse(packet["to"])
    return Frontend(address, Protocol[packet["protocol"]], port)


def key_of(packet: Packet) -> ServicePortKey:
    """Return the service port to which a packet is; it has one."""
    namespace, _, name = packet["frontend"]["service"].partition("/")
    return ServicePortKey(namespace, name, packet["frontend"]["port"], Protocol[packet["protocol"]])
