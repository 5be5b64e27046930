"""The questions that the control socket takes beside switches of the mode, answered by the running proxy."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from kproxy_core.backend.api import BackendSettings, Update
from kproxy_core.backend.registry import Registry
from kproxy_core.explain.change import document
from kproxy_core.explain.traffic import targets
from kproxy_core.modes.switch import ModeSwitch, Terms
from kproxy_core.process.inspection import explaining
from kproxy_core.process.inspection.previewing import operations
from kproxy_core.process.inspection.reporting import Objects, described
from kproxy_core.process.inspection.snapshot import snapshots, take
from kproxy_core.store.store import Store
from kproxy_core.sync.loop import Loop

Json = Mapping[str, Any]


class Inspection:
    """Answers from the plans and the kernel. Every method may be called from any thread but the loop's."""

    def __init__(
        self, loop: Loop, registry: Registry, switch: ModeSwitch, *,
        settings_of: Callable[[str], BackendSettings], terms: Callable[[str], Terms], store: Store,
        about: Callable[[], Json],
    ) -> None:  # fmt: skip
        """*about* returns the remaining fields of a report: configuration, metrics and log."""
        self._loop = loop
        self._registry = registry
        self._switch = switch
        self._settings_of = settings_of
        self._terms = terms
        self._store = store
        self._about = about

    def explain(self, request: Json) -> Sequence[Json]:
        """Return an answer for each packet that *request* means. Raises NoAnswer."""
        plans = snapshots(self._loop)
        return explaining.explain(request, plans, self._registry, self._switch.instance, live=True)

    def differences(self) -> Sequence[Json]:
        """Return the differences between the kernel and the plans. Raises NoAnswer."""
        instance = self._switch.instance
        return [
            *explaining.compare_with(snapshots(self._loop), instance),
            *explaining.leftovers(self._registry, self._settings_of, instance.mode),
        ]

    def plans(self) -> Sequence[Json]:
        return [document(plan) for plans in snapshots(self._loop).values() for plan in plans.plans.values()]

    def targets(self, service: str) -> Sequence[Json]:
        """Return the expected outcome of this node's connections to each TCP frontend. Raises NoAnswer."""
        return explaining.expectations(targets(snapshots(self._loop), service), self._switch.instance)

    def report(self) -> Json:
        """Return everything that this process can tell for a report."""
        plans, objects = self._loop.call(lambda: (take(self._loop), Objects.of(self._store)))
        return {**described(plans, objects), **self._about()}

    def operations(self, mode: str) -> Sequence[Json]:
        """Return how many operations *mode* needs to serve the plans, by family. Raises NoAnswer."""
        return [
            {"family": found["family"], "operations": found["operations"]} for found in self._preview(mode)]

    def _preview(self, mode: str) -> Sequence[Json]:
        terms, serving = self._terms(mode), self._switch.instance
        if mode == serving.mode:
            return operations(serving, self._updates(terms))
        instance = self._loop.call(partial(self._registry.make_backend, mode, terms.settings))
        try:
            return operations(instance, self._updates(terms))
        finally:
            self._loop.call(partial(self._registry.close_backend, instance))

    def _updates(self, terms: Terms) -> list[Update]:
        return self._loop.call(
            lambda: [replace(update, plans=dict(update.plans)) for update in self._loop.updates(terms.node)])
