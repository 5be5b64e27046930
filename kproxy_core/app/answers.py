"""Answers from plans and the kernel: of the running proxy, for its control socket and its page, and of
commands that have read the objects themselves.

A start imports nothing of this: the first question does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kproxy_core.app import verify
from kproxy_core.app.changes import changes_in_kernel, document
from kproxy_core.app.errors import NoAnswer
from kproxy_core.app.explain import (
    Case,
    Json,
    ReadablePlans,
    answer,
    cases,
    differences,
    packets_to,
    parse_sender,
    parse_target,
    stale,
    with_relay,
)
from kproxy_core.app.passage import Passage, WithMemory, passage
from kproxy_core.app.programs import Program as Writer
from kproxy_core.app.programs import program_of
from kproxy_core.app.requests import Answer, Compare, Explain, Targets
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError, PluginFailed
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Caveat, KernelSide, Scope, Update
from kproxy_core.kube.encode import encode_node, encode_objects, encode_service_cidr
from kproxy_core.kube.store import Store
from kproxy_core.linux import process, routes, rulesets, sysctl
from kproxy_core.linux.addresses import interface_towards, read_interface_addresses
from kproxy_core.linux.errors import HostError, doing
from kproxy_core.linux.libnftables import rule_text
from kproxy_core.linux.links import read_links
from kproxy_core.linux.modules import Modules, Presence
from kproxy_core.model.address import Address, Family, family_of, format_address
from kproxy_core.model.service import EndpointSlice, Service, ServiceName, ServicePortKey
from kproxy_core.modes.settings import ModeSettings
from kproxy_core.modes.switch import ModeSwitch
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.interpret import Program
from kproxy_core.nft.packet import Interface, Place, Route
from kproxy_core.nft.ruleset import ListedRuleset
from kproxy_core.plan.endpoints import Candidates
from kproxy_core.plan.last_resort import LastResort
from kproxy_core.plan.service_plan import Frontend, ServicePlan
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.plans import FamilyPlans

RelayProblem = Callable[[Family, ServicePortKey], str]
"""See `kproxy_core.sync.node_port_relays.NodePortRelays.problem`."""


_PENDING = "its change waits for smaller ones of other Services"


class Snapshot:
    """The running proxy's plans of one family at one moment. For any thread but the loop's."""

    def __init__(self, loop: Loop, plans: FamilyPlans, relay_problem: RelayProblem) -> None:
        """On the loop's thread, for as long as it takes to copy a dictionary."""
        self.node = plans.node
        self.addresses = plans.addresses
        self.now = loop.now
        self.plans: Mapping[ServicePortKey, ServicePlan] = dict(plans.plans)
        self.pending = plans.pending
        self.unserved = {**plans.unserved, **dict.fromkeys(self.pending, _PENDING)}
        self._loop = loop
        self._live = plans
        self._relay_problem = relay_problem
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

    def slices(self, service: ServiceName) -> Sequence[EndpointSlice]:
        """Return the EndpointSlices of a Service as they are now. Asks the loop's thread."""
        return self._loop.call(partial(self._live.slices, service))

    def origin(self, service: ServiceName) -> str:
        return self._live.origin(service)

    def last_resort(self, service: ServiceName) -> LastResort | None:
        return self._live.last_resort(service)

    def relay_problem(self, key: ServicePortKey) -> str:
        """Return why the relay of a node port does not listen; "" if it does, or there is none."""
        return self._relay_problem(self.node.family, key)


def take_snapshots(loop: Loop, relay_problem: RelayProblem) -> dict[Family, Snapshot]:
    """Return the plans of all families at one moment. On the loop's thread."""
    return {family: Snapshot(loop, plans, relay_problem) for family, plans in loop.plans.items()}


def snapshots(loop: Loop, relay_problem: RelayProblem) -> dict[Family, Snapshot]:
    """As `take_snapshots`, on any other thread."""
    return loop.call(partial(take_snapshots, loop, relay_problem))


class PlannedNode(Protocol):
    """A node's plans, and the backend whose kernel objects they are compared with."""

    @property
    def plans(self) -> Mapping[Family, ReadablePlans]: ...

    @property
    def registry(self) -> Registry: ...

    @property
    def instance(self) -> BackendInstance: ...

    @property
    def settings_of(self) -> Callable[[str], BackendSettings]:
        """Returns the settings of each mode."""


# What packets do: ``kproxy explain``, ``kproxy diff`` and ``kproxy verify``.

def explain(asked: Explain, node: PlannedNode, *, live: bool) -> Answer:
    """Return an answer for each packet, with the *live* kernel's side or with what a sync would write.

    Raises NoAnswer.
    """
    found = cases_of(asked, node.plans, node.instance, live=live)
    caveats = [caveats_of(case, node.registry, node.instance) for case in found]
    return {"mode": node.instance.mode, "packets": explain_cases(found, node.instance, caveats, live=live)}


def cases_of(
    asked: Explain, plans: Mapping[Family, ReadablePlans], instance: BackendInstance, *, live: bool
) -> list[Case]:
    """Return the packets that *asked* means. Raises NoAnswer.

    *live*: this machine is the node, so that its routes tell the interface of a sender.
    """
    sender = parse_sender(asked.sender, asked.origin)
    return cases(plans, parse_target(asked.to), sender, _interface_towards if live else None, instance)


def explain_cases(
    found: Sequence[Case], instance: BackendInstance, caveats: Sequence[Sequence[Caveat]], *, live: bool
) -> list[Json]:
    """Return the answers for all packets in *found*. Raises NoAnswer if the kernel cannot be read."""
    sides: dict[int, KernelSide] = {}
    for family in Family:
        of_family = [at for at, case in enumerate(found) if case.question.node.family is family]
        given = _kernel_sides(instance, [found[at] for at in of_family], live=live)
        sides |= dict(zip(of_family, given or (), strict=given is not None))
    answers = [
        answer(case, sides.get(at), mode=instance.mode, live=live, caveats=caveats[at])
        for at, case in enumerate(found)
    ]
    if live:
        for one, found_here in zip(answers, _passages(found, sides), strict=True):
            if found_here.outcome:
                one["outcome"], one["because"] = found_here.outcome, found_here.because
            one["ways"] = [way._asdict() for way in found_here.ways]
            one["remedy"] = found_here.remedy
            one["caveats"] += filter(None, [found_here.caveat])
            one["kernel"]["filters"] = list(found_here.places)
    return answers


def _passages(found: Sequence[Case], sides: Mapping[int, KernelSide]) -> list[Passage]:
    """Return what becomes of each packet on this node, by all rules of nf_tables and its routes."""
    if Modules().presence("nf_tables") not in (Presence.LOADED, Presence.BUILT_IN):  # Reading would load it.
        return [Passage("", "", ()) for _ in found]
    try:
        with (doing("read the rules of nf_tables"), NetlinkSocket.open(NETLINK_NETFILTER) as sock,
              routes.Routes() as found_routes):
            listed = ListedRuleset(sock)
            program, kernel = Program(WithMemory(listed)), _ThisKernel(listed, found_routes)
            return [passage(case, sides.get(at), program, kernel) for at, case in enumerate(found)]
    except HostError as error:
        return [Passage("", "", (str(error),)) for _ in found]


class _ThisKernel:
    """What the kernel tells besides its rules, as `NodeKernel` wants it. Each is read once."""

    def __init__(self, ruleset: ListedRuleset, found: routes.Routes) -> None:
        self._ruleset = ruleset
        self._routes = found
        self._texts: dict[Place, str] = {}
        self._links = {link.number: link for link in read_links()}
        self._addresses: dict[int, list[Address]] = {}
        for each in read_interface_addresses():
            self._addresses.setdefault(each.interface, []).append(each.address)

    def leaving(self, destination: Address, mark: int) -> Route:
        return _as_rules_see(self._routes.leaving(destination, mark))

    def forwarded(self, destination: Address, mark: int) -> Route:
        return _as_rules_see(self._routes.forwarded(destination, mark))

    def arrived(self, destination: Address, source: Address, interface: str, mark: int) -> Route:
        return _as_rules_see(self._routes.arrived(destination, source, interface, mark))

    def towards(self, address: Address) -> Interface | None:
        return self.leaving(address, 0).output

    def addresses(self, interface: Interface) -> Sequence[Address]:
        return self._addresses.get(interface.number, ())

    def ports(self, interface: Interface) -> frozenset[str]:
        return frozenset(link.name for link in self._links.values() if link.master == interface.number)

    def filters_bridge(self, interface: Interface, family: Family) -> bool:
        link = self._links.get(interface.number)
        if link is None or link.kind != "bridge":
            return False
        try:
            for_all = sysctl.read(f"net/bridge/bridge-nf-call-{family.ip}tables") == "1"
        except HostError:
            return False  # Without br_netfilter.
        return for_all or link.calls[family is Family.IPV6]

    def is_recent(self, name: str, source: Address) -> bool | None:
        return rulesets.is_recent(name, source)

    def chain_names(self, family: str, table: str) -> frozenset[str]:
        return self._ruleset.chain_names(family, table)

    def writer(self, place: Place) -> Writer | None:
        return program_of(place, self.chain_names)

    def rule_text(self, place: Place) -> str:
        if place not in self._texts:
            self._texts[place] = rule_text(place.family, place.table, place.chain, place.handle)
        return self._texts[place]


def _as_rules_see(found: routes.Route) -> Route:
    output = Interface(found.interface, found.number) if found.interface else None
    return Route(found.type, output, found.why)


def caveats_of(case: Case, registry: Registry, instance: BackendInstance) -> list[Caveat]:
    """Return what concerns the service port of *case*: why it is not served, and the caveats of the mode.

    Without the latter if the plugin fails.
    """
    question = case.question
    if question.plan is None:
        return []
    problem = case.plans.unserved.get(question.plan.key)
    unserved = [Caveat(f"not served, or only in part: {problem}", question.plan.key)] if problem else []
    plans = {question.plan.key: question.plan}
    update = Update(
        question.node.family, Scope.RESYNC, question.node, {}, plans, addresses=question.addresses)
    try:
        found = registry.caveats(instance.mode, update, instance.settings)
    except PluginFailed:
        return unserved
    return [*unserved, *(caveat for caveat in found if caveat.service_port == question.plan.key)]


def diff(node: PlannedNode) -> Answer:
    """Return the differences between the kernel and the plans, then the leftovers of other modes.

    Raises NoAnswer.
    """
    registry, instance = node.registry, node.instance
    found: list[Json] = []
    for family, of_family in node.plans.items():
        settled = [key for key in of_family.plans if key not in of_family.pending]
        found += compare(instance, packets_to(of_family, settled))
        found += stale(frontends_of(instance, family), of_family)
    used = registry.layers(instance.mode)
    for mode in [description.mode for description in registry.load_all() if description.mode not in used]:
        left = registry.cleanup(mode, node.settings_of(mode), dry_run=True, own_only=True)
        found += [
            {"kind": "leftover", "frontend": f"mode {mode}", "service_port": "", "senders": [],
             "difference": f"left {line}"}
            for line in left.removed
        ]
    return {"mode": instance.mode, "differences": found}


def compare(instance: BackendInstance, packets: Sequence[Case]) -> list[Json]:
    """Return the live kernel's deviations for *packets*. Raises NoAnswer."""
    sides = _kernel_sides(instance, packets, live=True)
    if sides is None:
        raise NoAnswer(f"mode {instance.mode} cannot explain its rules")
    return list(differences(packets, sides))


def frontends_of(instance: BackendInstance, family: Family) -> Sequence[Frontend]:
    """Return the frontends in the kernel; none if the mode does not tell. Raises NoAnswer."""
    with reading(family):
        return instance.frontends(family) or ()


def targets(asked: Targets, node: PlannedNode) -> Answer:
    """Return what connections of the node to its TCP frontends should do. Raises NoAnswer.

    The kernel only tells where the mode deviates by design; where it cannot be read, the plans count.
    """
    found = verify.targets(node.plans, asked.service)
    expected: list[Json] = []
    for family in Family:
        of_family = [case for case in found if case.question.node.family is family]
        sides: Sequence[KernelSide | None] | None = None
        with suppress(NoAnswer):
            sides = _kernel_sides(node.instance, of_family, live=True)
        expected += map(verify.expectation, of_family, sides or repeat(None))
    return {"mode": node.instance.mode, "targets": expected}


@contextmanager
def reading(family: Family) -> Iterator[None]:
    """Turn a failure to read the kernel into NoAnswer, with the capability that is missing."""
    try:
        yield
    except (BackendError, HostError) as error:
        missing = "" if "CAP_NET_ADMIN" in process.network_privileges() else "CAP_NET_ADMIN is missing; "
        raise NoAnswer(f"the kernel's {family.label} state cannot be read: {missing}{error}") from error


def _interface_towards(address: Address) -> str:
    with reading(family_of(address)):
        return interface_towards(address)


def _kernel_sides(
    instance: BackendInstance, packets: Sequence[Case], *, live: bool
) -> Sequence[KernelSide] | None:
    """Return the kernel's side of packets of one family; None: the mode has none. Raises NoAnswer."""
    if not packets:
        return ()
    with reading(packets[0].question.node.family):
        sides = instance.explain([case.question for case in packets], live=live)
    return None if sides is None else [
        with_relay(case, side, instance.wants_relays) for case, side in zip(packets, sides, strict=True)]


# The changes that other objects or another mode would make on this node: ``kproxy plan``.


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


def changes_from_kernel(plans: Mapping[Family, ReadablePlans], instance: BackendInstance) -> list[Json]:
    """Return the changes from the kernel's objects of *instance*'s mode to *plans*. Raises NoAnswer."""
    found: list[Json] = []
    for family, of_family in plans.items():
        held = frontends_of(instance, family)
        served = [plan.key for plan in of_family.plans.values() if not set(held).isdisjoint(plan.frontends())]
        differences = compare(instance, packets_to(of_family, served)) if served else []
        found += changes_in_kernel(of_family.plans.values(), held, differences, stale(held, of_family))
    return found


# The plans and objects of a node: ``kproxy report``.

def report(
    node: PlannedNode, services: Mapping[ServiceName, Service], slices: Sequence[EndpointSlice],
    origins: Mapping[ServiceName, str],
) -> Answer:
    """Return objects, plans and the node, so that another machine can plan the same."""
    plans = node.plans
    views = [of_family.node for of_family in plans.values()]
    own = [view.node_ip for view in views if view.node_ip is not None]
    pods = [view.local_source.cidr for view in views if view.local_source and view.local_source.cidr]
    name, zone = views[0].name, views[0].zone
    cidrs = [cidr for view in views for cidr in view.service_cidrs]
    encoded = [encode_node(name, zone, own, pods)]
    encoded += [encode_service_cidr(cidrs)] if cidrs else []
    encoded += encode_objects(services, slices)
    addresses = {address for of_family in plans.values() for address in of_family.addresses}
    return {
        "mode": node.instance.mode,
        "node": {"name": name, "zone": zone, "families": [view.family.label for view in views],
                 "addresses": sorted(map(format_address, addresses)),
                 "origins": {str(service): origin for service, origin in sorted(origins.items())}},
        "objects": encoded,
        "plans": documents(plans),
    }  # fmt: skip


def documents(plans: Mapping[Family, ReadablePlans]) -> list[Json]:
    return [document(plan) for of_family in plans.values() for plan in of_family.plans.values()]


# The running proxy.


class _Moment(NamedTuple):
    """The running proxy at one moment."""

    plans: Mapping[Family, Snapshot]
    registry: Registry
    instance: BackendInstance
    settings_of: Callable[[str], BackendSettings]


class Answers:
    """Answers of the running proxy. Every method may be called from any thread but the loop's.

    All of them raise NoAnswer or SwitchFailed.
    """

    def __init__(
        self, loop: Loop, registry: Registry, switch: ModeSwitch, store: Store, *,
        settings_of: Callable[[str], BackendSettings], mode_settings: Callable[[str], ModeSettings],
        relay_problem: RelayProblem,
    ) -> None:
        self._loop = loop
        self._registry = registry
        self._switch = switch
        self._store = store
        self._settings_of = settings_of
        self._mode_settings = mode_settings
        self._relay_problem = relay_problem

    def explain(self, asked: Explain) -> Answer:
        return explain(asked, self._now(), live=True)

    def diff(self) -> Answer:
        return diff(self._now())

    def targets(self, asked: Targets) -> Answer:
        return targets(asked, self._now())

    def plans(self) -> Answer:
        now = self._now()
        needing = [family.label for family in Family if now.instance.needs_interface_addresses(family)]
        return {"mode": now.instance.mode, "plans": documents(now.plans), "needs_addresses": needing}

    def report(self) -> Answer:
        store = self._store
        return report(*self._loop.call(lambda: (
            self._moment(), dict(store.services), store.all_slices(), dict(store.origins))))

    def compare(self, asked: Compare) -> Answer:
        """Return the caveats by which a mode differs, and how many operations it needs, by family."""
        found = self._switch.compare(asked.mode)
        kernel = [{"family": one["family"], "operations": one["operations"]}
                  for one in self._operations(asked.mode)]
        return {"mode": self._switch.instance.mode, "appearing": _caveats(found.appearing),
                "disappearing": _caveats(found.disappearing), "loses": found.loses, "kernel": kernel}

    def _now(self) -> _Moment:
        return self._loop.call(self._moment)

    def _moment(self) -> _Moment:
        """On the loop's thread."""
        plans = take_snapshots(self._loop, self._relay_problem)
        return _Moment(plans, self._registry, self._switch.instance, self._settings_of)

    def _operations(self, mode: str) -> Sequence[Json]:
        settings, serving = self._mode_settings(mode), self._switch.instance
        updates = self._loop.call(lambda: [
            replace(update, plans=dict(update.plans)) for update in self._loop.updates(settings.node)])
        if mode == serving.mode:
            return operations(serving, updates)
        instance = self._loop.call(partial(self._registry.make_backend, mode, settings.backend))
        try:
            return operations(instance, updates)
        finally:
            self._loop.call(instance.close)


def _caveats(caveats: Sequence[Caveat]) -> list[Json]:
    return [caveat._asdict() | {"service_port": str(caveat.service_port or "")} for caveat in caveats]
