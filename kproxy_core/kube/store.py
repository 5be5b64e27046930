"""One state from the events of all sources, with the Services that changed.

The state depends only on the last event for each object, never on their order. Two exceptions: a Node without
addresses or pod networks keeps those it had, and the last resort remembers endpoints that were ready.
"""

import logging
from collections.abc import Container, Iterable

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.model import events
from kproxy_core.model.address import Cidr, Family, outermost
from kproxy_core.model.node import NodeObject
from kproxy_core.model.readiness import LostReadiness
from kproxy_core.model.service import EndpointSlice, Service, ServiceName, SliceName

log = logging.getLogger("kproxy.sources")

_MOST_NAMED = 20
"""Limit for the changed objects named in one sync."""

_DELETED = "deleted"


class FamilyObjects(Struct):
    """The objects of one family, and their changes."""

    slices: dict[ServiceName, dict[str, EndpointSlice]] = {}
    """The slices of each Service, by their name."""
    lost: dict[ServiceName, LostReadiness] = {}
    """The endpoints that were ready, of Services that have a last resort."""
    changed: dict[ServiceName, None] = {}
    """The Services that may have changed since `take_changed`, in that order."""
    was_taken: bool = False
    """`take_changed` was called."""
    named: list[str] = []
    pending_services: int = 0
    """Changes of Services since `take_changed`."""
    pending_slices: int = 0
    """Changes of slices since then."""
    trigger_times: dict[ServiceName, list[float]] = {}

    def take_changed(self) -> dict[ServiceName, None]:
        """Return `changed`, which is empty then."""
        changed, self.changed = self.changed, {}
        self.was_taken = True
        self.pending_services = self.pending_slices = 0
        return changed

    def take_named(self) -> list[str]:
        """Return the first objects that changed since the last call, by kind, name and resource version."""
        named, self.named = self.named, []
        return named

    def take_trigger_times(self, except_of: Container[ServiceName] = ()) -> list[float]:
        """Return the times of endpoint changes since the last call, except those of some Services."""
        kept = {name: times for name, times in self.trigger_times.items() if name in except_of}
        trigger_times = {name: times for name, times in self.trigger_times.items() if name not in kept}
        self.trigger_times = kept
        return [time for times in trigger_times.values() for time in times]

    def note(self, kind: str, name: ServiceName | SliceName, state: str) -> None:
        """Remember the name of a changed object with its version or "deleted", up to a limit."""
        if len(self.named) < _MOST_NAMED:
            self.named.append(f"{kind} {name} {state}".rstrip())


class Store:
    """All objects of the families served.

    *families*: families that this node serves; slices of others are dropped. *kinds*: sources to wait for.
    *started*: earlier trigger times (seconds since the epoch) are ignored, because they would measure the
    downtime of this process. *external_ips*: serve external IPs (feature gate AllowServiceExternalIPs;
    CVE-2020-8554). *last_resort*: the seconds of Services that do not say it themselves; 0: they have none.
    *avoid_silent*: the answer of `avoids_silent` for such Services.
    """

    def __init__(
        self, families: Iterable[Family], kinds: Iterable[str], started: float, *, external_ips: bool = True,
        last_resort: float = 0.0, avoid_silent: bool = False,
    ) -> None:
        self.services: dict[ServiceName, Service] = {}
        self.origins: dict[ServiceName, str] = {}
        """The file or the resource version of each Service."""
        self.node: NodeObject | None = None
        """This node's Node object. As in kube-proxy, it is kept when it is deleted, and its addresses and
        networks when it is registered again without them, so that node ports are not lost."""
        self._service_cidrs: dict[str, tuple[Cidr, ...]] = {}
        self._joined_cidrs: tuple[Cidr, ...] | None = ()
        """None: they have changed."""
        self.missing = set(kinds)
        """Sources that have not delivered everything that existed."""
        self.service_changes = 0
        """Service events since the process started, once for each family as in kube-proxy's metrics."""
        self.endpoint_changes = 0
        """EndpointSlice events since the process started, even without a change."""
        self._started = started
        self._external_ips = external_ips
        self._last_resort = last_resort
        self._avoid_silent = avoid_silent
        self.families = {family: FamilyObjects() for family in families}
        self._slices: dict[SliceName, EndpointSlice] = {}

    @property
    def complete(self) -> bool:
        """Every source has delivered everything that existed when it started."""
        return not self.missing

    @property
    def service_cidrs(self) -> tuple[Cidr, ...]:
        """Networks of ClusterIPs: those of all ServiceCIDRs, which may overlap (KEP-1880).

        None is within another. They are joined when they are asked for, once for many ServiceCIDRs.
        """
        if self._joined_cidrs is None:
            self._joined_cidrs = outermost(
                cidr for cidrs in self._service_cidrs.values() for cidr in cidrs)
        return self._joined_cidrs

    def last_resort(self, name: ServiceName) -> float:
        """Return the seconds for which a Service has a last resort; 0: it has none, or does not exist."""
        service = self.services.get(name)
        if service is None:
            return 0.0
        return self._last_resort if service.last_resort is None else service.last_resort

    def avoids_silent(self, service: Service) -> bool:
        """Return whether endpoints of *service* that do not answer are put into quarantine."""
        health = service.endpoint_health
        return health == "passive" or (self._avoid_silent and health == "")

    def fold(self, event: events.Event, now: float = 0.0) -> None:
        """Take in *event*. *now*: monotonic seconds."""
        match event:
            case events.SliceSet():
                self._set_slice(event, now)
            case events.ServiceSet():
                self.origins[event.service.name] = event.origin
                self._set_service(event.service.name, event.service, event.origin)
            case events.SliceGone(slice_name) if piece := self._slices.get(slice_name):
                self.endpoint_changes += 1
                self._remove(piece, now)
            case events.ServiceGone(name):
                self.origins.pop(name, None)
                self._set_service(name, None, _DELETED)
            case events.NodeSet(node):
                known = self.node or node
                self.node = replace(node, addresses=node.addresses or known.addresses,
                                    pod_cidrs=node.pod_cidrs or known.pod_cidrs)  # fmt: skip
            case events.NodeGone():
                log.info("Node object of this node deleted, keeping its last state")
            case events.ServiceCidrSet(cidr_name, cidrs):
                self._service_cidrs[cidr_name] = cidrs
                self._joined_cidrs = None
            case events.ServiceCidrGone(cidr_name):
                self._service_cidrs.pop(cidr_name, None)
                self._joined_cidrs = None
            case events.Complete(source):
                self.missing.discard(source)

    def all_slices(self) -> list[EndpointSlice]:
        return [piece for _, piece in sorted(self._slices.items())]

    def _set_service(self, name: ServiceName, service: Service | None, origin: str) -> None:
        self.service_changes += len(self.families)
        if service is not None and service.external_ips and not self._external_ips:
            service = replace(service, external_ips=())
        if self.services.get(name) == service:
            return
        if service is None:
            del self.services[name]
        else:
            self.services[name] = service
        forget = not self.last_resort(name)
        for state in self.families.values():
            if forget:
                state.lost.pop(name, None)
            self._mark_changed(state, name)
            state.note("Service", name, origin)
            state.pending_services += 1

    def _set_slice(self, event: events.SliceSet, now: float) -> None:
        piece = event.slice
        known = self._slices.get(piece.name)
        state = self.families.get(piece.family)
        if state is not None:
            self.endpoint_changes += 1
        if known == piece:
            return
        if known is not None and (known.service != piece.service or known.family is not piece.family):
            self._remove(known, now)
            known = None
        if state is None:
            return
        self._slices[piece.name] = piece
        state.slices.setdefault(piece.service, {})[piece.name.name] = piece
        self._follow_readiness(state, piece.service, known, piece, now)
        state.changed[piece.service] = None
        state.note("EndpointSlice", piece.name, event.origin)
        state.pending_slices += 1
        if event.trigger_time is not None and event.trigger_time > self._started:
            state.trigger_times.setdefault(piece.service, []).append(event.trigger_time)

    def _remove(self, piece: EndpointSlice, now: float) -> None:
        """Remove *piece* and the trigger times of its Service, which would mislead now (as in kube-proxy)."""
        del self._slices[piece.name]
        state = self.families[piece.family]
        of_service = state.slices[piece.service]
        del of_service[piece.name.name]
        if not of_service:
            del state.slices[piece.service]
        self._follow_readiness(state, piece.service, piece, None, now)
        self._mark_changed(state, piece.service)
        state.note("EndpointSlice", piece.name, _DELETED)
        state.pending_slices += 1
        state.trigger_times.pop(piece.service, None)

    def _follow_readiness(
        self, state: FamilyObjects, name: ServiceName, before: EndpointSlice | None,
        after: EndpointSlice | None, now: float,
    ) -> None:
        """Keep `FamilyObjects.lost` after a slice *before* became *after*; None: it does not exist."""
        if not self.last_resort(name):
            return
        lost = state.lost.get(name) or LostReadiness()
        lost.follow(before, after, state.slices.get(name, {}).values(), now)
        if lost.endpoints:
            state.lost[name] = lost
        else:
            state.lost.pop(name, None)

    def _mark_changed(self, state: FamilyObjects, name: ServiceName) -> None:
        """Note that a Service may have changed, but forget one that is deleted before any was planned."""
        if not state.was_taken and name not in self.services:
            state.changed.pop(name, None)
        else:
            state.changed[name] = None
