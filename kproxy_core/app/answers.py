"""Answers about the running proxy: for the control socket, the page in the browser, and commands without a
proxy.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kproxy_core.app.explain import (
    Case,
    NoAnswer,
    Plans,
    answer,
    cases,
    changes_in_kernel,
    differences,
    document,
    expectation,
    packets_to,
    parse_sender,
    parse_target,
    stale,
    targets,
)
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError, PluginFailed
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Caveat, Failure, KernelSide, Scope, Update
from kproxy_core.kube.encode import encode_node, encode_service, encode_service_cidr, encode_slice
from kproxy_core.kube.store import Store
from kproxy_core.linux import process
from kproxy_core.linux.addresses import interface_towards
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, Family, family_of, format_address, format_socket
from kproxy_core.model.service import EndpointSlice, Service, ServiceName, ServicePortKey
from kproxy_core.modes.switch import ModeSwitch, Terms
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.history import SyncHistory
from kproxy_core.observe.pages import About
from kproxy_core.observe.traffic import EndpointTotal, Total
from kproxy_core.plan.endpoints import Candidates
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.plans import FamilyPlans

if TYPE_CHECKING:
    from kproxy_core.observe.traffic import TrafficRecorder

# The running proxy's plans as they were at one moment, so that the loop's thread need not answer.


class Snapshot:
    """The plans of one family. For any thread but the loop's."""

    def __init__(self, loop: Loop, plans: FamilyPlans) -> None:
        """On the loop's thread, for as long as it takes to copy a dictionary."""
        self.node = plans.node
        self.addresses = plans.addresses
        self.plans: Mapping[ServicePortKey, ServicePlan] = dict(plans.plans)
        self._loop = loop
        self._live = plans
        self._candidates: dict[ServicePortKey, Candidates] = {}

    def owner(self, frontend: Frontend) -> ServicePlan | None:
        """Return the plan of the service port that holds *frontend* now."""
        plan = self._live.owner(frontend)  # Only looks up single keys, which any thread may do.
        return self.plans.get(plan.key) if plan is not None else None

    def candidates(self, key: ServicePortKey) -> Candidates:
        """Return all endpoints of one service port as they are now. Asks the loop's thread."""
        if key not in self._candidates:
            self._candidates[key] = self._loop.call(partial(self._live.candidates, key))
        return self._candidates[key]

    def origin(self, service: ServiceName) -> str:
        return self._live.origin(service)


def take(loop: Loop) -> dict[Family, Snapshot]:
    """Return the plans of all families at one moment. On the loop's thread."""
    return {family: Snapshot(loop, plans) for family, plans in loop.plans.items()}


def snapshots(loop: Loop) -> dict[Family, Snapshot]:
    """As `take`, on any other thread."""
    return loop.call(partial(take, loop))


# Answers to ``kproxy explain`` and ``kproxy diff``, from the running proxy's plans or from others.

def cases_of(given: Mapping[str, Any], plans: Mapping[Family, Plans], *, live: bool) -> list[Case]:
    """Return the packets that ``to``, ``from`` and ``origin`` in *given* mean. Raises NoAnswer.

    *live*: this machine is the node, so that its routes tell the interface of a sender.
    """
    sender = parse_sender(str(given.get("from", "")), str(given.get("origin", "")))
    return cases(plans, parse_target(str(given.get("to", ""))), sender, _interface_towards if live else None)


def explain(
    given: Mapping[str, Any], plans: Mapping[Family, Plans], registry: Registry, instance: BackendInstance, *,
    live: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return an answer for each packet, with the *live* kernel's side or with what a sync would write.

    Raises NoAnswer.
    """
    found = cases_of(given, plans, live=live)
    return answers(found, instance, [caveats_of(case, registry, instance) for case in found], live=live)


def answers(
    found: Sequence[Case], instance: BackendInstance, caveats: Sequence[Sequence[Caveat]], *, live: bool
) -> list[dict[str, Any]]:
    """Return the answers for all packets in *found*. Raises NoAnswer if the kernel cannot be read."""
    sides: dict[int, KernelSide] = {}
    for family in Family:
        of_family = [at for at, case in enumerate(found) if case.question.node.family is family]
        given = _ask(instance, [found[at] for at in of_family], live=live)
        sides |= dict(zip(of_family, given or (), strict=given is not None))
    return [
        answer(case, sides.get(at), mode=instance.mode, live=live, caveats=caveats[at])
        for at, case in enumerate(found)
    ]


def caveats_of(case: Case, registry: Registry, instance: BackendInstance) -> list[Caveat]:
    """Return the caveats of the mode that concern the service port of *case*; none if the plugin fails."""
    question = case.question
    if question.plan is None:
        return []
    plans = {question.plan.key: question.plan}
    update = Update(question.node.family, Scope.RESYNC, question.node, {}, plans)
    try:
        found = registry.caveats(instance.mode, update, instance.settings)
    except PluginFailed:
        return []
    return [caveat for caveat in found if caveat.service_port == question.plan.key]


def compare_all(
    plans: Mapping[Family, Plans], registry: Registry, instance: BackendInstance,
    settings_of: Callable[[str], BackendSettings],
) -> list[dict[str, Any]]:
    """Return the differences between the kernel and *plans*, then the leftovers of other modes.

    Raises NoAnswer.
    """
    found: list[dict[str, Any]] = []
    for family, of_family in plans.items():
        found += compare(instance, packets_to(of_family, list(of_family.plans)))
        found += stale(frontends_of(instance, family), of_family)
    used = registry.layers(instance.mode)
    for mode in [description.mode for description in registry.load_all() if description.mode not in used]:
        found += [
            {"kind": "leftover", "frontend": f"mode {mode}", "service_port": "", "senders": [],
             "difference": f"left {line}"}
            for line in registry.cleanup(mode, settings_of(mode), dry_run=True, own_only=True).removed
        ]
    return found


def compare(instance: BackendInstance, packets: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the live kernel's deviations for *packets*. Raises NoAnswer."""
    sides = _ask(instance, packets, live=True)
    if sides is None:
        raise NoAnswer(f"mode {instance.mode} cannot explain its rules")
    return list(differences(packets, sides))


def frontends_of(instance: BackendInstance, family: Family) -> Sequence[Frontend]:
    """Return the frontends in the kernel; none if the mode does not tell. Raises NoAnswer."""
    with reading(family):
        return instance.frontends(family) or ()


def expectations(found: Sequence[Case], instance: BackendInstance) -> list[dict[str, Any]]:
    """Return what connections of the node to the frontends in *found* should do.

    The kernel only tells where the mode deviates by design; where it cannot be read, the plans count.
    """
    expected: list[dict[str, Any]] = []
    for family in Family:
        of_family = [case for case in found if case.question.node.family is family]
        sides: Sequence[KernelSide | None] | None = None
        with suppress(NoAnswer):
            sides = _ask(instance, of_family, live=True)
        expected += map(expectation, of_family, sides or repeat(None))
    return expected


@contextmanager
def reading(family: Family) -> Iterator[None]:
    """Turn a failure to read the kernel into NoAnswer, with the capability that is missing."""
    try:
        yield
    except (BackendError, HostError) as error:
        missing = "" if "CAP_NET_ADMIN" in process.held() else "CAP_NET_ADMIN is missing; "
        raise NoAnswer(f"the kernel's {family.label} state cannot be read: {missing}{error}") from error


def _interface_towards(address: Address) -> str:
    with reading(family_of(address)):
        return interface_towards(address)


def _ask(instance: BackendInstance, packets: Sequence[Case], *, live: bool) -> Sequence[KernelSide] | None:
    """Return the kernel's side of packets of one family; None: the mode has none. Raises NoAnswer."""
    if not packets:
        return ()
    with reading(packets[0].question.node.family):
        return instance.explain([case.question for case in packets], live=live)


# The changes that other objects or another mode would make on this node.

Json = dict[str, Any]


def operations(instance: BackendInstance, updates: Sequence[Update]) -> list[Json]:
    """Return the number of operations that each of *updates* needs, and their text.

    [] if the mode does not tell. Raises NoAnswer.
    """
    found = []
    for update in updates:
        with reading(update.family):
            preview = instance.preview(update)
        if preview is not None:
            found.append({"family": update.family.label, **preview._asdict()})
    return found


def changes_from_kernel(plans: Mapping[Family, FamilyPlans], instance: BackendInstance) -> list[Json]:
    """Return the changes from the kernel's objects of *instance*'s mode to *plans*. Raises NoAnswer."""
    found: list[Json] = []
    for family, of_family in plans.items():
        held = frontends_of(instance, family)
        served = [plan.key for plan in of_family.plans.values() if not set(held).isdisjoint(plan.frontends())]
        differences = compare(instance, packets_to(of_family, served)) if served else []
        found += changes_in_kernel(of_family.plans.values(), held, differences, stale(held, of_family))
    return found


# The part of a report that the plans and objects make up; see `kproxy_core.cli.report`.

def described(
    plans: Mapping[Family, Plans], services: Mapping[ServiceName, Service], slices: Sequence[EndpointSlice],
    origins: Mapping[ServiceName, str],
) -> Json:
    """Return objects, plans and the node, so that another machine can plan the same."""
    views = [of_family.node for of_family in plans.values()]
    own = [view.node_ip for view in views if view.node_ip is not None]
    pods = [view.local_source.cidr for view in views if view.local_source and view.local_source.cidr]
    name, zone = views[0].name, views[0].zone
    cidrs = [cidr for view in views for cidr in view.service_cidrs]
    encoded = [encode_node(name, zone, own, pods)]
    encoded += [encode_service_cidr(cidrs)] if cidrs else []
    encoded += [encode_service(service) for _, service in sorted(services.items())]
    encoded += [encode_slice(piece) for piece in slices]
    addresses = {address for of_family in plans.values() for address in of_family.addresses}
    return {
        "node": {"name": name, "zone": zone, "families": [view.family.label for view in views],
                 "addresses": sorted(map(format_address, addresses)),
                 "origins": {str(service): origin for service, origin in sorted(origins.items())}},
        "objects": encoded,
        "plans": documents(plans),
    }  # fmt: skip


def documents(plans: Mapping[Family, Plans]) -> list[Json]:
    return [document(plan) for of_family in plans.values() for plan in of_family.plans.values()]


# Answers about the whole proxy for `kproxy top` and the page in the browser, as plain values for JSON.

_AT_ONCE = 50
"""Service ports that the loop's thread describes in one call."""
_MOST = 500
"""Most service ports in an answer."""
_MOST_ENDPOINTS = 50
"""Most endpoints of a service port in an answer."""

SORTS: Mapping[str, Callable[[Total], float]] = {
    "connections": lambda total: total.forwarded + total.rejected,
    "rate": lambda total: total.rate,
    "rejected": lambda total: total.rejected,
    "failed": lambda total: total.failures,
    "bytes": lambda total: total.volume.bytes_to_endpoint + total.volume.bytes_from_endpoint,
}
"""Orders other than by name; the largest value is first."""

_NONE = Total()


class Overview:
    """Reads the running proxy and changes nothing. Not for the loop's thread, which it asks."""

    def __init__(
        self, loop: Loop, health: ProxyHealth, about: About, history: SyncHistory | None,
        traffic: "TrafficRecorder | None", node: str,
    ) -> None:
        self._loop = loop
        self._health = health
        self._about = about
        self._history = history
        self._traffic = traffic
        self._node = node

    def status(self) -> dict[str, Any]:
        """Return mode, health, problems and the last syncs."""
        health = json.loads(self._health.healthz().body)
        fallback = self._about.fallback
        problems = list(health.get("problems", ()))
        if fallback is not None and fallback.serving == self._about.mode:
            problems.append(str(fallback))
        return {
            "node": self._node, "mode": self._about.mode, "version": self._about.version,
            "uptime": time.time() - self._about.started, "now": time.time(),
            "healthy": bool(health["healthy"]), "eligible": bool(health.get("nodeEligible", True)),
            "problems": problems, "counted": self._traffic is not None,
            "syncs": [record._asdict() for record in self._history.records] if self._history else [],
        }  # fmt: skip

    def services(
        self, search: str = "", sort: str = "name", start: int = 0, count: int = _AT_ONCE
    ) -> dict[str, Any]:
        """Return the service ports whose name has all words of *search*, from the *start*-th on.

        *sort* is ``name`` or one of `SORTS`.
        """
        totals = self._traffic.read() if self._traffic is not None else {}
        plans = self._loop.call(lambda: list(self._loop.plans.values()))
        keys: set[ServicePortKey] = set()
        for family in plans:
            keys |= self._loop.call(partial(set, family.plans))
        words = search.lower().split()
        found = sorted(key for key in keys if all(word in str(key) for word in words))
        by = SORTS.get(sort)
        if by is not None:
            found.sort(key=lambda key: by(totals.get(key, _NONE)), reverse=True)
        wanted = found[start:start + min(count, _MOST)]
        rows = [
            row for at in range(0, len(wanted), _AT_ONCE)
            for row in self._loop.call(partial(_describe, plans, wanted[at:at + _AT_ONCE]))
        ]
        now = time.monotonic()
        for key, row in zip(wanted, rows, strict=True):
            _add_traffic(row, totals.get(key, _NONE), now)
        return {"services": rows, "found": len(found), "all": len(keys), "start": start,
                "counted": self._traffic is not None}


def explain_or_problem(inspection: Callable[[], "Inspection"], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the answer to a question about packets, or the reason for which there is none."""
    try:
        return inspection().explain(asked)
    except NoAnswer as error:
        return {"packets": [], "problem": str(error)}


def _describe(plans: Sequence[FamilyPlans], keys: Sequence[ServicePortKey]) -> list[dict[str, Any]]:
    return [_row(plans, key) for key in keys]


def _row(plans: Sequence[FamilyPlans], key: ServicePortKey) -> dict[str, Any]:
    frontends: list[str] = []
    endpoints: list[str] = []
    problems: list[str] = []
    for family in plans:
        plan = family.plans.get(key)
        if plan is None:
            continue
        frontends += map(_frontend, plan.frontends())
        endpoints += [format_socket(*where) for where in plan.reachable]
        if problem := family.unserved.get(key):
            problems.append(f"{family.family.label}: {problem}")
    if not endpoints:
        problems.append("no endpoints")
    return {
        "namespace": key.namespace, "name": key.name, "port": key.port_name, "protocol": key.protocol.name,
        "service_port": str(key), "frontends": list(dict.fromkeys(frontends)),
        "endpoints": [{"endpoint": where, "usable": True} for where in endpoints[:_MOST_ENDPOINTS]],
        "endpoint_count": len(endpoints), "problems": problems,
    }  # fmt: skip


def _frontend(frontend: Frontend) -> str:
    address, _, port = frontend
    return f"node:{port}" if address is None else format_socket(address, port)


def _add_traffic(row: dict[str, Any], total: Total, now: float) -> None:
    row |= {"forwarded": total.forwarded, "rejected": total.rejected, "failed": total.failures,
            "rate": round(total.rate, 3), **total.volume._asdict()}
    to = {format_socket(*where): one for where, one in list(total.endpoints.items())}
    for endpoint in row["endpoints"]:
        one = to.pop(endpoint["endpoint"], None)
        endpoint |= _of_endpoint(one or EndpointTotal())
    row["endpoints"] += [
        {"endpoint": name, "usable": False, **_of_endpoint(one), "seconds_ago": round(now - one.last)}
        for name, one in sorted(to.items(), key=lambda item: -item[1].last)[:_MOST_ENDPOINTS]
        if row["endpoint_count"] <= _MOST_ENDPOINTS
    ]


def _of_endpoint(total: EndpointTotal) -> dict[str, Any]:
    failed = {failure.value: total.failed.get(failure, 0) for failure in Failure}
    return {"forwarded": total.forwarded, **failed, **total.volume._asdict()}


# The questions that the control socket takes beside switches of the mode, answered by the running proxy.

Request = Mapping[str, Any]


class Inspection:
    """Answers from the plans and the kernel. Every method may be called from any thread but the loop's."""

    def __init__(
        self, loop: Loop, registry: Registry, switch: ModeSwitch, *,
        settings_of: Callable[[str], BackendSettings], terms: Callable[[str], Terms], store: Store,
        about: Callable[[], Request],
    ) -> None:  # fmt: skip
        """*about* returns the remaining fields of a report: configuration, metrics and log."""
        self._loop = loop
        self._registry = registry
        self._switch = switch
        self._settings_of = settings_of
        self._terms = terms
        self._store = store
        self._about = about

    def answer(self, request: Request) -> Request:
        """Return the fields of the answer to *request*. Raises NoAnswer or SwitchFailed."""
        instance = self._switch.instance
        match request:
            case {"do": "explain", "to": str()}:
                found = self.explain(request)
            case {"do": "compare", "mode": str(mode)}:
                found = self._compare(mode)
            case {"do": "diff"}:
                found = {"differences": compare_all(
                    snapshots(self._loop), self._registry, instance, self._settings_of)}
            case {"do": "targets", "service": str(service)}:
                cases = targets(snapshots(self._loop), service)
                found = {"targets": expectations(cases, instance)}
            case {"do": "report"}:
                store = self._store
                objects = self._loop.call(lambda: (
                    take(self._loop), dict(store.services), store.all_slices(), dict(store.origins)))
                found = {**described(*objects), **self._about()}
            case {"do": "plans"}:
                found = {"plans": documents(snapshots(self._loop))}
            case _:
                raise NoAnswer("unknown request")
        return {"mode": instance.mode, **found}

    def explain(self, request: Request) -> Request:
        """Return an answer for each packet that *request* means. Raises NoAnswer."""
        plans = snapshots(self._loop)
        return {"packets": explain(
            request, plans, self._registry, self._switch.instance, live=True)}

    def _compare(self, mode: str) -> Request:
        """Return the caveats by which *mode* differs, and how many operations it needs, by family."""
        found = self._switch.compare(mode)
        kernel = [{"family": one["family"], "operations": one["operations"]} for one in self._preview(mode)]
        return {"appearing": _caveats(found.appearing), "disappearing": _caveats(found.disappearing),
                "loses": found.loses, "kernel": kernel}

    def _preview(self, mode: str) -> Sequence[Request]:
        terms, serving = self._terms(mode), self._switch.instance
        updates = self._loop.call(
            lambda: [replace(update, plans=dict(update.plans)) for update in self._loop.updates(terms.node)])
        if mode == serving.mode:
            return operations(serving, updates)
        instance = self._loop.call(partial(self._registry.make_backend, mode, terms.settings))
        try:
            return operations(instance, updates)
        finally:
            self._loop.call(partial(self._registry.close_backend, instance))


def _caveats(caveats: Sequence[Caveat]) -> list[Request]:
    return [caveat._asdict() | {"service_port": str(caveat.service_port or "")} for caveat in caveats]
