"""A loop with two modes that keep their rules in memory."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kproxy_conformance.builders import service
from kproxy_core.contract.backend import Backend
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.hooks import ENTRY_POINTS, hookimpl
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import (
    CONTRACT,
    BackendSettings,
    Caveat,
    Damage,
    Description,
    Detection,
    Leftovers,
    Requirement,
    Scope,
    SyncReport,
    Update,
)
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.events import Complete, ServiceSet
from kproxy_core.model.service import ServicePortKey
from kproxy_core.modes.journal import Journal
from kproxy_core.modes.retirement import RetiringModes
from kproxy_core.modes.settings import ModeSettings
from kproxy_core.modes.switch import ModeSwitch
from kproxy_core.sync.node_facts import NodeSettings
from kproxy_core.sync.pacing import Pacing
from tests.core.loop_rig import Rig

V4 = Family.IPV4
WEB, DNS = service("web", ip="127.0.0.2"), service("dns", "53/UDP", ip="127.0.0.3")
SELF = parse_address("127.0.0.1")
SETTINGS = BackendSettings((V4,))


@dataclass(eq=False)
class Mode:
    """A plugin with its kernel; what happens to it is a line in *story*."""

    name: str
    story: list[str]
    rules: dict[ServicePortKey, object] = field(default_factory=dict)
    connections: int = 0
    in_grace: bool = False
    blind: int = 0
    """So many looks at connections go wrong."""
    usable: bool = True
    problems: list[Exception | None] = field(default_factory=list)
    """Raised by the next syncs, one each."""
    restless: bool = False
    """Each sync reports something to do."""
    unserved: dict[ServicePortKey, str] = field(default_factory=dict)
    """Each sync reports these."""
    degraded: str = ""
    """Each sync reports this."""
    parts: int = 0
    """So many of the next syncs leave a part of what they were given."""
    strangers: bool = False
    """kube-proxy left something in the same mode."""
    caveats: tuple[Caveat, ...] = ()
    damaged: Damage | None = None
    during: Callable[[], object] = lambda: None
    """Called by each sync."""
    during_detection: Callable[[], object] = lambda: None

    def entry(self) -> Any:
        return SimpleNamespace(group=ENTRY_POINTS, name=self.name, load=lambda: self, dist=None)

    @hookimpl
    def kproxy_describe(self) -> Description:
        return Description(self.name, "in memory", CONTRACT)

    @hookimpl
    def kproxy_detect(self) -> Detection:
        self.during_detection()
        return Detection((Requirement("luck", self.usable, "some"),))

    @hookimpl
    def kproxy_caveats(self) -> tuple[Caveat, ...]:
        return self.caveats

    @hookimpl
    def kproxy_cleanup(self, dry_run: bool) -> Leftovers:
        removed = tuple(map(str, self.rules))
        if not dry_run:
            self.story.append(f"clean up {self.name}")
            self.rules.clear()
        return Leftovers(removed)

    @hookimpl
    def kproxy_supersede(self, dry_run: bool) -> Leftovers:
        removed = ("a stranger's rules",) if self.strangers else ()
        if not dry_run:
            self.story.append(f"supersede in {self.name}")
            self.strangers = False
        return Leftovers(removed)

    @hookimpl
    def kproxy_retire(self) -> Leftovers:
        if self.blind:
            self.blind -= 1
            self.story.append(f"can't see who is left of {self.name}")
            return Leftovers(errors=("too dark",))
        self.story.append(f"retire {self.name}, {self.connections} left")
        return Leftovers(waiting=self.connections, in_grace=self.in_grace)

    @hookimpl
    def kproxy_make_backend(self) -> Backend:
        return InMemory(self)


class InMemory(Backend):
    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def sync(self, update: Update) -> SyncReport:
        mode = self._mode
        mode.during()
        problem = mode.problems.pop(0) if mode.problems else None
        if problem is not None:
            mode.story.append(f"{mode.name} fails")
            raise problem
        before = dict(mode.rules)
        if update.scope is Scope.RESYNC:
            mode.rules = dict(update.plans)
        for key, plan in update.changed.items():
            mode.rules[key] = plan
            if plan is None:
                del mode.rules[key]
        mode.story.append(f"{mode.name} {update.scope.value}")
        unfinished = frozenset(mode.rules) if mode.parts else frozenset()
        mode.parts = max(0, mode.parts - 1)
        return SyncReport(
            int(mode.restless or before != mode.rules), unserved=dict(mode.unserved), degraded=mode.degraded,
            unfinished=unfinished)

    def watch(self, damaged: Damage) -> bool:
        self._mode.story.append(f"watch {self._mode.name}")
        self._mode.damaged = damaged
        return True

    def close(self) -> None:
        self._mode.story.append(f"close {self._mode.name}")


class Room:
    """A loop that runs in a thread of its own with mode ``old``, and a ``new`` one beside it."""

    def __init__(self, directory: Path) -> None:
        self.story: list[str] = []
        self.old, self.new = Mode("old", self.story), Mode("new", self.story)
        self.registry = Registry([self.old.entry(), self.new.entry()])
        instance = self.registry.make_backend("old", SETTINGS)
        self.synced = threading.Event()
        self.node = NodeSettings(name="node1")
        self.rig = Rig(families=[V4], instance=instance, settings=self.node, addresses=[SELF],
                       all_synced=self.synced.set)
        self.journal = Journal(str(directory))
        self.retiring = RetiringModes(self.registry, lambda mode: SETTINGS, "old", interval=0.01)
        self.told: list[str] = []
        self.serving: list[BackendInstance] = []
        self.switch = ModeSwitch(
            self.rig.loop, self.registry, self.retiring, self.journal, instance=instance, configured="old",
            mode_settings=self.settings_of, mode_changed=self.serving.append, pause=0.0,
        )
        self.thread = threading.Thread(target=self.rig.loop.run, daemon=True)

    def settings_of(self, mode: str) -> ModeSettings:
        return ModeSettings(backend=SETTINGS, node=self.node,
                            pacing=lambda: Pacing(min_interval=0.0, retry_cap=30.0, shortest_rest=0.0))

    def start(self) -> None:
        self.thread.start()
        self.rig.loop.emit([ServiceSet(WEB), Complete("test")])
        assert self.synced.wait(120)
        self.story.clear()

    def to(self, mode: str) -> None:
        self.switch.switch_to(mode, self.told.append)

    def settle(self) -> None:
        """Wait until the loop has done what it was asked for."""
        for _ in range(3):
            self.rig.loop.call(lambda: None)

    def stop(self) -> None:
        self.rig.loop.stop()
        self.thread.join(120)
        self.retiring.close()


def names(mode: Mode) -> set[str]:
    return {key.name for key in mode.rules}
