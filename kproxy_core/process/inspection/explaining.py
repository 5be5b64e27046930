"""Answers to ``kproxy explain`` and ``kproxy diff``, from the running proxy's plans or from others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any

from kproxy_core.backend.api import BackendSettings, Caveat, KernelSide, Scope, Update
from kproxy_core.backend.errors import BackendError, PluginFailed
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry
from kproxy_core.explain.answer import answer
from kproxy_core.explain.difference import differences, packets_to, stale
from kproxy_core.explain.errors import NoAnswer
from kproxy_core.explain.question import Case, Plans, cases
from kproxy_core.explain.request import parse_sender, parse_target
from kproxy_core.explain.traffic import expectation
from kproxy_core.host import privileges
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.routes import interface_towards
from kproxy_core.model.address import Address, Family, family_of
from kproxy_core.plan.service_plan import Frontend


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
        missing = "" if "CAP_NET_ADMIN" in privileges.held() else "CAP_NET_ADMIN is missing; "
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
