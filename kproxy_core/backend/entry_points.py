"""The entry points of installed distributions that announce plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kproxy_core.backend.hookspecs import ENTRY_POINTS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OBSERVERS = "kproxy.observers"
"""Entry point group of plugins that provide no mode: they watch or wrap the hooks of those that do."""


class BrokenPlugin(Struct, frozen=True):
    name: str
    """Of its entry point."""
    distribution: str
    problem: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} is not used: {self.problem}"


def installed_entry_points() -> list[EntryPoint]:
    """Return all entry points of observers, then of backends."""
    from importlib.metadata import entry_points  # 25 ms, and tests bring their own

    found = entry_points()
    return [*found.select(group=OBSERVERS), *found.select(group=ENTRY_POINTS)]


def distribution_of(entry: EntryPoint) -> str:
    """Return name and version of the distribution that *entry* belongs to."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown distribution"
