"""The backend that is judged: found as kproxy finds it, made, used and let go."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

from kproxy_core.backend.api import BackendSettings, Damage, Leftovers, SyncReport, Update
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.testing.builders import changed_update, full_update
from kproxy_core.testing.conformance.features import ADDRESSES, Plans


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the author asked to have judged, and how."""

    mode: str
    plugins: tuple[str, ...] = ()
    """As ``kproxy -p`` takes them."""
    options: Mapping[str, object] = field(default_factory=dict)
    """As ``kproxy.backendOptions`` has them for the mode."""
    node: tuple[str, ...] = ()
    """Commands that make the node what the backend finds, such as the rules of a kubelet."""
    state: tuple[str, ...] = ()
    """Commands that print what the backend keeps, where the kit would not look."""
    damage: tuple[str, ...] = ()
    """Commands that destroy what the backend keeps, where the kit would not know how."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Checks that ask for what the backend does not do, and why; "": the backend announces that itself."""


_BEGUN: WeakSet[BackendInstance] = WeakSet()
"""Those that were told that they are to serve."""


class Subject:
    """The plugin of one mode in a registry of its own, and the backends that it made."""

    def __init__(self, wanted: Wanted, families: Sequence[Family] = tuple(Family)) -> None:
        self.wanted = wanted
        self.mode = wanted.mode
        self.registry = Registry(plugins=wanted.plugins)
        self.settings = BackendSettings(tuple(families), options=dict(wanted.options))
        self._instances: list[BackendInstance] = []

    def start(self) -> BackendInstance:
        """As a process that starts."""
        instance = self.registry.make_backend(self.mode, self.settings)
        self._instances.append(instance)
        return instance

    def end(self, instance: BackendInstance) -> None:
        """As a process that ends."""
        self._instances.remove(instance)
        self.registry.close_backend(instance)

    def end_all(self) -> None:
        """End what still runs. What is in the kernel goes with the namespace, the rest by clean-up."""
        for instance in list(self._instances):
            self.end(instance)
        if self.wanted.state:
            self.cleanup()

    def retire(self, instance: BackendInstance | None) -> Leftovers:
        """As when another mode serves; *instance*, if it still runs, is the one that served."""
        return self.registry.retire(self.mode, self.settings, instance=instance)

    def cleanup(self, *, dry_run: bool = False, own_only: bool = False) -> Leftovers:
        return self.registry.cleanup(self.mode, self.settings, dry_run=dry_run, own_only=own_only)


def full(instance: BackendInstance, family: Family, plans: Plans, node: NodeView | None = None) -> SyncReport:
    """A full sync. What it is given does not outlive the call, as the contract says.

    Before the first one the backend is told that it is to serve.
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
    instance: BackendInstance,
    family: Family,
    after: Plans,
    changed: Iterable[ServicePortKey],
    node: NodeView | None = None,
) -> SyncReport:
    """A sync of the service ports *changed*, to what *after* says; with *node*, the node has changed."""
    given = dict(after)
    update = changed_update(node or ADDRESSES[family].view(), given, changed)
    if node is not None:
        update = Update(update.family, update.scope, node, update.changed, given, node_changed=True)
    try:
        return instance.sync(update)
    finally:
        given.clear()


def render(instance: BackendInstance, family: Family, plans: Plans) -> str:
    return instance.render(full_update(ADDRESSES[family].view(), plans))


def deaf(family: Family, what: str) -> None:
    """A `Damage` that nobody listens to."""


_: Damage = deaf
