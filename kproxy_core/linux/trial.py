"""Kernel features tried in a child process, which may move to a network namespace of its own."""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kproxy_core.linux import sysctl
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.modules import Modules, Presence
from kproxy_core.model.requirement import Requirement

T = TypeVar("T")

TIMEOUT = 60.0
"""Timeout in seconds for one trial."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


class TrialFailed(Exception):
    """The child process ended without a result; ``str()`` says how."""


class TrialNamespace:
    """A network namespace that this process can enter, and that is deleted when it ends."""

    def enter(self) -> str:
        """Move this process there for good. Return "" or the reason why that is impossible.

        Without the privilege, also enters a new user namespace if the kernel allows that.
        """
        user, group = os.geteuid(), os.getegid()
        problem = _unshare(_CLONE_NEWNET)
        if problem == errno.EPERM:
            problem = _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
            if not problem:
                try:
                    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
                    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
                    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
                except OSError as error:
                    return f"cannot map users into a user namespace: {error.strerror}"
        if problem:
            return f"cannot create a network namespace: {os.strerror(problem)}"
        # This namespace shares no rules, and the lock file may be inaccessible.
        os.environ["XTABLES_LOCKFILE"] = os.devnull
        return ""


def run_in_child(trial: Callable[[TrialNamespace], T], timeout: float = TIMEOUT) -> T:
    """Return the result of *trial*, called in a fork of this process, which may crash or hang.

    The result must be picklable. This process must have no other threads. Raises TrialFailed.
    """
    import multiprocessing  # which only a trial needs

    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: writer.send(trial(TrialNamespace())))
    child.start()
    writer.close()
    try:
        if not reader.poll(timeout):
            raise TrialFailed(f"no answer within {timeout:g} s")
        result: T = reader.recv()
        return result
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise TrialFailed(f"ended {how}") from None
    finally:
        child.kill()
        child.join()
        reader.close()


def _unshare(flags: int) -> int:
    """Move to new namespaces. Return the error number, 0 for success."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.unshare(flags) else 0


class FeatureProbe:
    """Detects kernel features by trying them where that is harmless, or else by looking at modules.

    Loads no module without permission.
    """

    def __init__(self, modules: Modules, *, why_not: str, load_modules: bool) -> None:
        """*why_not* is the reason why nothing can be tried; "" if this process runs in a trial namespace."""
        self.modules = modules
        self._why_not = why_not
        self.load_modules = load_modules

    def attempt(
        self, what: str, own: Sequence[str], act: Callable[[], str], remedy: str = "",
        *, rests_on: Sequence[str] = (),
    ) -> Requirement:
        """Try one kernel feature. *own* are the modules that provide it, *rests_on* those they depend on.

        *act* returns "" if the kernel accepts the feature, else the kernel's reason.
        """
        needed = (*rests_on, *own)
        missing = [name for name in needed if self.modules.presence(name) is Presence.LOADABLE]
        refused = self.modules.load(missing) if self.load_modules and missing else ""
        waiting = self.modules.not_loaded(needed)
        if waiting and not self.load_modules:
            return self._guess(what, own, needed, f"not tried, that would load {_listed(waiting)}", remedy)
        if self._why_not:
            return self._guess(what, own, needed, f"not tried: {self._why_not}", remedy)
        problem = act()
        if not problem:
            seen = self.described(own)
            return Requirement(what, True, f"works ({seen})" if seen else "works")
        absent = [self.modules.remedy(m) for m in needed
                  if self.modules.presence(m) not in (Presence.LOADED, Presence.BUILT_IN)]  # fmt: skip
        return Requirement(what, False, "; ".join(filter(None, (problem, refused))),
                       "; ".join(filter(None, (remedy, *absent))))  # fmt: skip

    def described(self, names: Sequence[str]) -> str:
        """Describe the presence of each module, except unknown ones."""
        seen: dict[Presence, list[str]] = {}
        for name in names:
            seen.setdefault(self.modules.presence(name), []).append(name)
        seen.pop(Presence.UNKNOWN, None)
        return ", ".join(f"{_listed(names)} {presence.value}" for presence, names in seen.items())

    def _guess(
        self, what: str, own: Sequence[str], needed: Sequence[str], why_not: str, remedy: str
    ) -> Requirement:
        absent = [name for name in needed if self.modules.presence(name) is Presence.ABSENT]
        found = "; ".join(filter(None, (self.described([*dict.fromkeys([*own, *absent])]), why_not)))
        if not absent:
            return Requirement(what, True, found, guessed=True)
        remedies = (remedy, *map(self.modules.remedy, absent))
        return Requirement(what, False, found, "; ".join(filter(None, remedies)), guessed=True)


def _listed(names: Sequence[str]) -> str:
    first, last = ", ".join(names[:-1]), names[-1]
    return f"{first} and {last}" if first else last


def problem_of(act: Callable[[], object]) -> str:
    """Return why *act* fails with a HostError; "" if it succeeds."""
    try:
        act()
    except HostError as error:
        return str(error)
    return ""


def sysctl_finding(name: str, value: int, remedy: str) -> Requirement:
    """Check that the sysctl *name* has *value*, or can be set to it; *remedy* says what to do otherwise."""
    what = f"sysctl {name.replace('/', '.')} = {value}"
    try:
        present = sysctl.read(name)
    except HostError as error:
        return Requirement(what, False, str(error), remedy)
    if present == str(value):
        return Requirement(what, True, f"is {present}")
    if os.access(Path("/proc/sys") / name, os.W_OK):
        return Requirement(what, True, f"is {present}, and can be set")
    return Requirement(what, False, f"is {present}, and cannot be set from here", remedy)
