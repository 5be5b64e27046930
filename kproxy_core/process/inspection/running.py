"""The questions that the control socket takes beside switches of the mode, answered by the running proxy."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from kproxy_core.backend.api import BackendSettings, Caveat
from kproxy_core.backend.registry import Registry
from kproxy_core.explain.errors import NoAnswer
from kproxy_core.explain.traffic import targets
from kproxy_core.modes.switch import ModeSwitch, Terms
from kproxy_core.process.inspection import explaining
from kproxy_core.process.inspection.previewing import operations
from kproxy_core.process.inspection.reporting import described, documents
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

    def answer(self, request: Json) -> Json:
        """Return the fields of the answer to *request*. Raises NoAnswer or SwitchFailed."""
        instance = self._switch.instance
        match request:
            case {"do": "explain", "to": str()}:
                found = self.explain(request)
            case {"do": "compare", "mode": str(mode)}:
                found = self._compare(mode)
            case {"do": "diff"}:
                found = {"differences": explaining.compare_all(
                    snapshots(self._loop), self._registry, instance, self._settings_of)}
            case {"do": "targets", "service": str(service)}:
                cases = targets(snapshots(self._loop), service)
                found = {"targets": explaining.expectations(cases, instance)}
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

    def explain(self, request: Json) -> Json:
        """Return an answer for each packet that *request* means. Raises NoAnswer."""
        plans = snapshots(self._loop)
        return {"packets": explaining.explain(
            request, plans, self._registry, self._switch.instance, live=True)}

    def _compare(self, mode: str) -> Json:
        """Return the caveats by which *mode* differs, and how many operations it needs, by family."""
        found = self._switch.compare(mode)
        kernel = [{"family": one["family"], "operations": one["operations"]} for one in self._preview(mode)]
        return {"appearing": _caveats(found.appearing), "disappearing": _caveats(found.disappearing),
                "loses": found.loses, "kernel": kernel}

    def _preview(self, mode: str) -> Sequence[Json]:
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


def _caveats(caveats: Sequence[Caveat]) -> list[Json]:
    return [caveat._asdict() | {"service_port": str(caveat.service_port or "")} for caveat in caveats]
