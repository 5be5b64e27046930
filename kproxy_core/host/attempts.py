"""Finding out what the kernel can do by trying it, or else by looking at its modules."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kproxy_core.host import sysctl
from kproxy_core.host.errors import HostError
from kproxy_core.host.modules import Modules, Presence, load


class Finding(NamedTuple):
    """The fields of a backend's `Requirement`."""

    what: str
    met: bool
    found: str
    remedy: str = ""
    guessed: bool = False


class Attempts:
    """Tries one thing after another, where trying harms nobody and loads no module against orders."""

    def __init__(self, modules: Modules, *, why_not: str, load_modules: bool) -> None:
        """*why_not*: why nothing can be tried; "": this process is in a namespace made for that."""
        self.modules = modules
        self._why_not = why_not
        self.load_modules = load_modules

    def attempt(
        self, what: str, own: Sequence[str], act: Callable[[], str], remedy: str = "",
        *, rests_on: Sequence[str] = (),
    ) -> Finding:
        """Whether *what* is there, which is in the modules *own* and needs those that it *rests_on*.

        *act* tries it, and returns "" or what the kernel has against it.
        """
        needed = (*rests_on, *own)
        refused = ""
        if self.load_modules and (missing := self._loadable(needed)):
            refused = load(missing)
            self.modules = self.modules.afresh()
        waiting = self.modules.not_loaded(needed)
        if waiting and not self.load_modules:
            return self._guess(what, own, needed, f"not tried, that would load {_listed(waiting)}", remedy)
        if self._why_not:
            return self._guess(what, own, needed, f"not tried: {self._why_not}", remedy)
        problem = act()
        if not problem:
            seen = self.described(own)
            return Finding(what, True, f"works ({seen})" if seen else "works")
        absent = [self.modules.remedy(m) for m in needed
                  if self.modules.where(m) not in (Presence.LOADED, Presence.BUILT_IN)]  # fmt: skip
        return Finding(what, False, "; ".join(filter(None, (problem, refused))),
                       "; ".join(filter(None, (remedy, *absent))))  # fmt: skip

    def described(self, names: Sequence[str]) -> str:
        """How the kernel has each of the modules; those that can't be seen are left out."""
        seen: dict[Presence, list[str]] = {}
        for name in names:
            seen.setdefault(self.modules.where(name), []).append(name)
        seen.pop(Presence.UNKNOWN, None)
        return ", ".join(f"{_listed(names)} {where.value}" for where, names in seen.items())

    def _loadable(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.modules.where(name) is Presence.LOADABLE]

    def _guess(
        self, what: str, own: Sequence[str], needed: Sequence[str], why_not: str, remedy: str
    ) -> Finding:
        absent = [name for name in needed if self.modules.where(name) is Presence.ABSENT]
        told = "; ".join(filter(None, (self.described([*dict.fromkeys([*own, *absent])]), why_not)))
        if not absent:
            return Finding(what, True, told, guessed=True)
        remedies = (remedy, *map(self.modules.remedy, absent))
        return Finding(what, False, told, "; ".join(filter(None, remedies)), guessed=True)

def _listed(names: Sequence[str]) -> str:
    first, last = ", ".join(names[:-1]), names[-1]
    return f"{first} and {last}" if first else last


def sysctl_finding(name: str, value: int, remedy: str) -> Finding:
    """Whether the sysctl *name* is or can be set to *value*; else *remedy* is what to do about it."""
    what = f"sysctl {name.replace('/', '.')} = {value}"
    try:
        present = sysctl.read(name)
    except HostError as error:
        return Finding(what, False, str(error), remedy)
    if present == str(value):
        return Finding(what, True, f"is {present}")
    if os.access(Path("/proc/sys") / name, os.W_OK):
        return Finding(what, True, f"is {present}, and can be set")
    return Finding(what, False, f"is {present}, and can't be set from here", remedy)
