"""Plugins named by the operator, as in pytest: ``-p NAME_OR_MODULE`` loads one, ``-p no:NAME`` blocks one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kproxy_core.backend.errors import BackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_KEEP_OUT = "no:"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


class PluginNotFound(BackendError):
    """No plugin has the name that the operator gave."""


def read_names(words: Iterable[str]) -> dict[str, bool]:
    """Parse *words*. Return the plugins that they name: True, load it in any case; False, never.

    Of two words about one plugin, the later one counts.
    """
    said: dict[str, bool] = {}
    for word in map(str.strip, words):
        name = word.removeprefix(_KEEP_OUT)
        said.pop(name, None)
        if name:
            said[name] = not word.startswith(_KEEP_OUT)
    return said


def import_named(name: str, installed: Iterable[EntryPoint]) -> object:
    """Import the module *name*, or the object ``module:object``, and return it.

    Raises PluginNotFound if it does not exist, or any exception that the module raises.
    """
    from importlib.metadata import EntryPoint

    found: str | None = None
    if _MODULE.fullmatch(name):
        try:
            plugin: object = EntryPoint(name, name, "").load()
            return plugin
        except ModuleNotFoundError as error:
            if not error.name or not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
                raise  # The module exists, but fails to import another one.
            found = str(error)
    names = ", ".join(sorted({entry.name for entry in installed})) or "none"
    raise PluginNotFound(
        f"there is no plugin {name!r}: not a module ({found or 'not a module name'}),"
        f" and the installed ones are: {names}"
    )
