"""Answers to ``kproxy explain``: from the plans of the running proxy, or of objects that were just read."""

from collections.abc import Mapping, Sequence
from typing import Any

from kproxy_core.backend.api import Caveat, KernelSide, Scope, Update
from kproxy_core.backend.errors import BackendError
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry
from kproxy_core.explain.answer import answer
from kproxy_core.explain.question import Case, Plans, cases
from kproxy_core.explain.request import NoAnswer, parse_sender, parse_target
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_core.sync.loop import Loop


class Request:
    """The words of one request, checked."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """*given* has ``to``, ``from`` and ``origin`` as text. Raises NoAnswer."""
        self._target = parse_target(str(given.get("to", "")))
        self._sender = parse_sender(str(given.get("from", "")), str(given.get("origin", "")))

    def cases(self, plans: Mapping[Family, Plans]) -> list[Case]:
        """Return the packets that are asked about. Raises NoAnswer."""
        return cases(plans, self._target, self._sender)


def explain_running(
    given: Mapping[str, Any], loop: Loop, registry: Registry, instance: BackendInstance
) -> list[dict[str, Any]]:
    """Return an answer for each packet, with the live kernel's side. Raises NoAnswer.

    The loop's thread only looks the plans up; the kernel is read in the calling thread.
    """
    request = Request(given)

    def look() -> tuple[list[Case], list[list[Caveat]]]:
        found = request.cases(loop.plans)
        return found, [caveats_of(case, registry, instance) for case in found]

    found, caveats = loop.call(look)
    return answers(found, instance, caveats, live=True)


def explain_written(
    given: Mapping[str, Any], plans: Mapping[Family, Plans], registry: Registry, instance: BackendInstance
) -> list[dict[str, Any]]:
    """Return an answer for each packet, with the objects that a sync would write. Raises NoAnswer."""
    found = Request(given).cases(plans)
    return answers(found, instance, [caveats_of(case, registry, instance) for case in found], live=False)


def answers(
    found: Sequence[Case], instance: BackendInstance, caveats: Sequence[Sequence[Caveat]], *, live: bool
) -> list[dict[str, Any]]:
    """Return the answers for all packets in *found*. Raises NoAnswer if the kernel cannot be read."""
    sides: dict[int, KernelSide] = {}
    for family in Family:
        of_family = [at for at, case in enumerate(found) if case.question.node.family is family]
        if not of_family:
            continue
        try:
            given = instance.explain([found[at].question for at in of_family], live=live)
        except (BackendError, HostError) as error:
            raise NoAnswer(f"the kernel's {family.label} state cannot be read: {error}") from error
        sides |= dict(zip(of_family, given or (), strict=given is not None))
    return [
        answer(case, sides.get(at), mode=instance.mode, live=live, caveats=caveats[at])
        for at, case in enumerate(found)
    ]


def caveats_of(case: Case, registry: Registry, instance: BackendInstance) -> list[Caveat]:
    """Return the caveats of the mode that concern the service port of *case*."""
    question = case.question
    if question.plan is None:
        return []
    plans = {question.plan.key: question.plan}
    update = Update(question.node.family, Scope.RESYNC, question.node, {}, plans)
    return [
        caveat for caveat in registry.caveats(instance.mode, update, instance.settings)
        if caveat.service_port == question.plan.key
    ]
