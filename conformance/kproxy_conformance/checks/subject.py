"""The backend under test: found as kproxy finds it, made, used and closed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from weakref import WeakSet

from kproxy_conformance.builders import changed_update, full_update
from kproxy_conformance.checks.check import NotApplicable
from kproxy_conformance.checks.features import ADDRESSES, Plans
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.network.wiring import DEFAULT
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Damage, Leftovers, SyncReport, Update
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey


@dataclass(frozen=True, slots=True)
class Wanted:
    """The author's settings: the mode to check, and how."""

    mode: str
    plugins: tuple[str, ...] = ()
    """As ``kproxy -p`` takes them."""
    options: Mapping[str, object] = field(default_factory=dict)
    """As ``kproxy.backendOptions`` has them for the mode."""
    node: tuple[str, ...] = ()
    """Commands that create kernel objects which the backend expects, such as a kubelet's rules."""
    state: tuple[str, ...] = ()
    """Commands that print state which the kit does not know."""
    damage: tuple[str, ...] = ()
    """Commands that destroy that state."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Patterns of checks and scenarios that do not apply, with the reason; "": a caveat gives it."""
    cgroup: NodeCgroup | None = None
    """For the sockets of the node and its pods, if the mode works at sockets."""
    wiring: str = DEFAULT
    """The choice of a wiring for scenarios, as `wiring.chosen` takes it."""

    def excuse(self, name: str) -> str | None:
        """Return why the check or scenario *name* does not apply; None: it applies."""
        return next(
            (reason for pattern, reason in self.not_applicable.items() if fnmatchcase(name, pattern)), None
        )


_BEGUN: WeakSet[BackendInstance] = WeakSet()
"""Backends whose begin() was called."""


class Subject:
    """The plugin of one mode in a registry of its own, and the backends that it made."""

    def __init__(self, wanted: Wanted, families: Sequence[Family] = tuple(Family)) -> None:
        self.wanted = wanted
        self.mode = wanted.mode
        self.registry = Registry(plugins=wanted.plugins)
        self.settings = BackendSettings(tuple(families), options=dict(wanted.options))
        self._instances: list[BackendInstance] = []

    def start(self, mode: str = "") -> BackendInstance:
        """Make a backend, as a new process would; of *mode* instead of the mode under test."""
        instance = self.registry.make_backend(mode or self.mode, self.settings)
        self._instances.append(instance)
        return instance

    def end(self, instance: BackendInstance) -> None:
        """Close a backend, as an exiting process would."""
        self._instances.remove(instance)
        instance.close()

    def end_all(self) -> None:
        """Close all backends. The namespace takes its kernel state along; clean-up removes the rest."""
        for instance in list(self._instances):
            self.end(instance)
        if self.wanted.state:
            self.cleanup()

    def retire(self, instance: BackendInstance | None) -> Leftovers:
        """Retire the mode, as after a switch; *instance* is the backend that served, if it still exists."""
        return self._of_each_layer(
            lambda layer: self.registry.retire(
                layer, self.settings, instance=instance if layer == self.mode else None
            )
        )

    def cleanup(self, *, dry_run: bool = False, own_only: bool = False) -> Leftovers:
        """Clean up after the mode, and after its base."""
        return self._of_each_layer(
            lambda layer: self.registry.cleanup(layer, self.settings, dry_run=dry_run, own_only=own_only)
        )

    def _of_each_layer(self, ask: Callable[[str], Leftovers]) -> Leftovers:
        """Return the answers of the mode and then of its base as one, as the core asks them."""
        return Leftovers.merged(map(ask, reversed(self.registry.layers(self.mode))), self.mode)


def full(instance: BackendInstance, family: Family, plans: Plans, node: NodeView | None = None) -> SyncReport:
    """Run a full sync, with plans that are valid only during the call, as the contract says.

    Before the first one, call begin().
    """
    if instance not in _BEGUN:
        instance.begin()
        _BEGUN.add(instance)
    given = dict(plans)
    update = full_update(node or ADDRESSES[family].view(), given)
    try:
        return instance.sync(update)
    finally:
        given.clear()


def change(
    instance: BackendInstance, family: Family, after: Plans, changed: Iterable[ServicePortKey],
    node: NodeView | None = None,
) -> SyncReport:
    """Sync the service ports *changed* to *after*; with *node*, the node has changed, too."""
    given = dict(after)
    update = changed_update(node or ADDRESSES[family].view(), given, changed)
    if node is not None:
        update = Update(update.family, update.scope, node, update.changed, given, node_changed=True)
    try:
        return instance.sync(update)
    finally:
        given.clear()


def render(instance: BackendInstance, family: Family, plans: Plans) -> str:
    """Return the rules as text. Raises NotApplicable if the backend has no such text."""
    text = instance.render(full_update(ADDRESSES[family].view(), plans))
    if text is None:
        raise NotApplicable("render says that there is no text")
    return text


def deaf(family: Family, what: str) -> None:
    """Ignore a report: a `Damage` without a listener."""


_: Damage = deaf
