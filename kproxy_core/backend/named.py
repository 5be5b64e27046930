"""The plugins that an operator names: ``-p NAME_OR_MODULE`` loads one, ``-p no:NAME`` keeps one out.

As in pytest. A name is that of an entry point: a mode, or what an observer calls itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kproxy_core.backend.errors import BackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_KEEP_OUT = "no:"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


class PluginNotFound(BackendError):
    """Nothing has the name that an operator gave."""


@dataclass(frozen=True, slots=True)
class NamedPlugins:
    """What is to be loaded whatever else is needed, and what is never to be loaded."""

    wanted: tuple[str, ...] = ()
    blocked: frozenset[str] = frozenset()


def read_names(words: Iterable[str]) -> NamedPlugins:
    """What *words* say; of two about one plugin, the later one counts."""
    said: dict[str, bool] = {}
    for word in map(str.strip, words):
        name = word.removeprefix(_KEEP_OUT)
        said.pop(name, None)
        if name:
            said[name] = not word.startswith(_KEEP_OUT)
    return NamedPlugins(
        tuple(name for name, wanted in said.items() if wanted),
        frozenset(name for name, wanted in said.items() if not wanted),
    )


def import_named(name: str, installed: Iterable[EntryPoint]) -> object:
    """The module, or the object ``module:object``, that *name* says.

    Raises PluginNotFound if there is none, or whatever a stranger's module raises.
    """
    from importlib.metadata import EntryPoint

    found: str | None = None
    if _MODULE.fullmatch(name):
        try:
            plugin: object = EntryPoint(name, name, "").load()
            return plugin
        except ModuleNotFoundError as error:
            if not error.name or not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
                raise  # The module is there, and lacks another.
            found = str(error)
    names = ", ".join(sorted({entry.name for entry in installed})) or "none"
    raise PluginNotFound(
        f"there is no plugin {name!r}: it is no module ({found or 'nor could it be one'}),"
        f" and those installed are: {names}"
    )
