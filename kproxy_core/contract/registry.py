"""The registry of backend plugins: finds them, rejects those that do not fit, and addresses one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pluggy
from msgspec import Struct

from kproxy_core.contract import hooks, values
from kproxy_core.contract.backend import Backend
from kproxy_core.contract.calls import (
    BackendInstance,
    CoreSync,
    HookCalls,
    WrongAnswer,
    checked,
    plugin_of_backend,
)
from kproxy_core.contract.caveats import of_limits
from kproxy_core.contract.errors import BackendError, InvalidInput, InvalidOption, PluginFailed, one_line
from kproxy_core.contract.hooks import ENTRY_POINTS
from kproxy_core.linux.errors import HostError
from kproxy_core.model.near_names import did_you_mean
from kproxy_core.model.service import Destination

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from kproxy_core.model.address import Protocol

# The entry points of installed distributions that announce plugins.

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


# Plugins named by the operator, as in pytest: ``-p NAME_OR_MODULE`` loads one, ``-p no:NAME`` blocks one.

_KEEP_OUT = "no:"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


class PluginNotFound(InvalidInput):
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


# A plugin is the object that an entry point in the group ``kproxy.backends`` names: a module or object
# with the hooks of `hooks`. The entry point's name is the mode. Each is loaded separately and only when
# needed, so a broken one harms no other, and has the hooks of its mode to itself, with all observers.

PLUGIN_HOOKS = ("kproxy_describe", "kproxy_cleanup", "kproxy_make_backend")

_MODE = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class UnknownMode(InvalidInput):
    """No plugin provides the requested mode."""

    def __init__(self, mode: str, known: Iterable[str], *, blocked: bool) -> None:
        problem = f"the plugin of mode {mode!r} is blocked by -p no:{mode}" if blocked else (
            f"no backend provides mode {mode!r}{did_you_mean(mode, known)}")
        others = f"{'others' if blocked else 'installed'}: {', '.join(known) or 'none'}"
        where = "" if blocked else f", by entry points of the group {ENTRY_POINTS!r}"
        super().__init__("; ".join((problem, others + where, *(() if blocked else _unread()))))


def _unread() -> list[str]:
    """Return a hint at each entry point group whose name is nearly that of backends."""
    import difflib  # needed only after a mistake
    from importlib.metadata import entry_points

    found = entry_points()
    groups = sorted(found.groups - {ENTRY_POINTS, OBSERVERS})
    hints = []
    for group in groups:
        if difflib.SequenceMatcher(None, group.lower(), ENTRY_POINTS).ratio() > 0.8:
            owners = sorted({distribution_of(entry) for entry in found.select(group=group)})
            hints.append(f"the group {group!r} of {', '.join(owners)} is not read")
    return hints


class PluginRefused(BackendError):
    """A plugin, or a backend that it made, violates the contract."""


class Registry:
    """The plugins of one process."""

    def __init__(
        self, entry_points: Iterable[EntryPoint] | None = None, *, plugins: Iterable[str] = ()
    ) -> None:
        """*plugins* are the values of ``-p``: see `named`.

        Raises PluginNotFound or PluginRefused for one of those.
        """
        self.calls = HookCalls()
        self._observers: dict[str, object] = {}
        """By name, in the order in which they were loaded."""
        self._managers: dict[str, pluggy.PluginManager] = {}
        """By mode: its plugin, and all observers."""
        self.descriptions: dict[str, values.Description] = {}
        """Descriptions of the loaded plugins, by mode."""
        self.broken: list[BrokenPlugin] = []
        self._offered: dict[str, EntryPoint] = {}
        named = read_names(plugins)
        self._blocked = frozenset(name for name, is_wanted in named.items() if not is_wanted)
        installed = list(installed_entry_points() if entry_points is None else entry_points)
        for entry in installed:
            if entry.name in self._blocked:
                continue
            if entry.group == OBSERVERS:
                self._load_observer(entry)
            elif entry.name in self._offered:
                first = distribution_of(self._offered[entry.name])
                self._refuse(entry, f"mode {entry.name!r} is already provided by {first}")
            else:
                self._offered[entry.name] = entry
        for name, is_wanted in named.items():
            if is_wanted:
                self._load_named(name, installed)

    @property
    def observers(self) -> list[str]:
        """The names of all observers, in the order in which they were loaded."""
        return list(self._observers)

    @property
    def modes(self) -> list[str]:
        """All installed modes, loaded or not, sorted."""
        return sorted({*self._offered, *self.descriptions})

    def check_mode(self, mode: str) -> None:
        """Raise UnknownMode if no plugin provides *mode*."""
        if mode not in self.modes:
            raise UnknownMode(mode, self.modes, blocked=mode in self._blocked)

    def load(self, mode: str) -> values.Description:
        """Load the plugin of *mode* if needed; return its description. Raises UnknownMode, PluginRefused."""
        known = self.descriptions.get(mode)
        if known is not None:
            return known
        entry = self._offered.get(mode)
        if entry is None:
            raise UnknownMode(mode, self.modes, blocked=mode in self._blocked)
        try:
            return self._add(entry.load(), mode)
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            raise PluginRefused(str(self._refuse(entry, _reason(error)))) from error

    def load_all(self) -> list[values.Description]:
        """Load every plugin; `broken` has those that fail. Return the descriptions, most preferred first."""
        for mode in self.modes:
            with suppress(PluginRefused):
                self.load(mode)
        return sorted(self.descriptions.values(), key=lambda d: (-d.preference, d.mode))

    def is_of_node(self, interface: str) -> bool:
        """Return whether *interface* is the node's own, and not created by a loaded backend for itself."""
        return all(interface not in known.interfaces for known in tuple(self.descriptions.values()))

    def layers(self, mode: str) -> tuple[str, ...]:
        """Return *mode*, preceded by the mode that it stands on, if any.

        Raises UnknownMode or PluginRefused.
        """
        base = self.load(mode).base
        if not base:
            return (mode,)
        if self.load(base).base:
            raise PluginRefused(f"mode {mode!r} has the base {base!r}, which has a base itself")
        return (base, mode)

    def options(self, mode: str) -> frozenset[str] | None:
        """Return the names of the options of *mode* and its base; None: it may have any.

        Raises UnknownMode or PluginRefused.
        """
        names: set[str] = set()
        for layer in self.layers(mode):
            if (known := self.load(layer).options) is None:
                return None
            names.update(known)
        return frozenset(names)

    def make_backend(self, mode: str, settings: values.BackendSettings) -> BackendInstance:
        """Make the backend for *mode*, on top of a new one of its base, if it has one.

        Raises UnknownMode, PluginRefused, PluginFailed, InvalidOption, or Unsupported if it can't work on
        this machine.
        """
        made: dict[str, Backend] = {}
        for layer in self.layers(mode):
            try:
                made[layer] = self._make(layer, settings, next(iter(made.values()), None))
            except BaseException:
                for base in made:
                    self._instance(base, settings, made).close()
                raise
        return self._instance(mode, settings, made)

    def _instance(
        self, mode: str, settings: values.BackendSettings, layers: Mapping[str, Backend]
    ) -> BackendInstance:
        return BackendInstance(mode, settings, layers, self._managers[mode].hook, self.calls)

    def _make(self, mode: str, settings: values.BackendSettings, base: Backend | None) -> Backend:
        made: Backend | None = self._call(
            mode, "kproxy_make_backend", {"mode": mode, "settings": settings, "base": base})
        if made is None:
            raise PluginRefused(f"the plugin for mode {mode!r} made no backend for it")
        return made

    def prepare(self, mode: str, settings: values.BackendSettings) -> None:
        """Have the plugin for *mode* make the settings of the whole machine that it needs.

        Raises UnknownMode, PluginRefused, PluginFailed, or what the plugin raises by contract.
        """
        for layer in self.layers(mode):
            self._ask(layer, "kproxy_prepare", settings=settings)

    def caveats(
        self, mode: str, update: values.Update, settings: values.BackendSettings
    ) -> tuple[values.Caveat, ...]:
        """Return the caveats that *mode* has for *update*.

        Raises UnknownMode, PluginRefused or PluginFailed.
        """
        found: list[values.Caveat] = [
            caveat
            for layer in self.layers(mode)
            for answer in self._answers(layer, "kproxy_caveats", update=update, settings=settings)
            for caveat in answer
        ]
        found += of_limits(update)
        replaced = {(caveat.replaces, caveat.service_port) for caveat in found if caveat.replaces}
        return tuple(caveat for caveat in found if (caveat.what, caveat.service_port) not in replaced)

    def detect(
        self, mode: str, settings: values.BackendSettings, trial: values.Trial | None = None, *,
        load_modules: bool = False,
    ) -> values.Detection:
        """Ask the plugin for *mode* whether it works here. A plugin that fails to answer does not work.

        For *trial* and *load_modules* see `hooks.kproxy_detect`. Raises UnknownMode, PluginRefused or
        InvalidOption.
        """
        found: list[values.Requirement] = []
        for layer in self.layers(mode):
            try:
                found += self._requirements(layer, settings, trial, load_modules=load_modules)
            except InvalidOption:
                raise
            except (BackendError, HostError) as error:
                found.append(_no_answer(_reason(error)))
        return values.Detection(tuple(found), mode)

    def _requirements(
        self, mode: str, settings: values.BackendSettings, trial: values.Trial | None, *, load_modules: bool
    ) -> Iterable[values.Requirement]:
        answer = self._ask(mode, "kproxy_detect", logged=False, settings=settings, trial=trial,
                           load_modules=load_modules)
        if answer is not None:
            found: Iterable[values.Requirement] = answer.requirements
            return found
        return [_no_answer("none was given")] if self._implements(mode, "kproxy_detect") else []

    def dialled(
        self, mode: str, protocol: Protocol, source: Destination, endpoint: Destination
    ) -> Destination | None:
        """Return the frontend that a socket dialled; see `hooks.kproxy_dialled`.

        Raises HostError or PluginFailed.
        """
        found: Destination | None = self._ask(
            mode, "kproxy_dialled", protocol=protocol, source=source, endpoint=endpoint)
        return found

    def cleanup(
        self, mode: str, settings: values.BackendSettings, *, dry_run: bool, own_only: bool = False
    ) -> values.Leftovers:
        """Remove every trace of *mode* from the kernel."""
        return self._leftovers(mode, "kproxy_cleanup", settings=settings, dry_run=dry_run, own_only=own_only)

    def retire(
        self, mode: str, settings: values.BackendSettings, *, instance: BackendInstance | None = None,
        traces: bool = True,
    ) -> values.Leftovers:
        """Remove the traces of *mode*, except those that `waiting` established connections need.

        *instance* is the backend that served in this process, if any. *traces*: include what is not bound to
        it. Call this while the result `is_needed`, then `BackendInstance.close`, and `cleanup`.
        """
        found = []
        if instance is not None:
            try:
                found.append(instance.retire())
            except (BackendError, HostError) as error:
                found.append(values.Leftovers(errors=(_reason(error),)))
        if traces:
            found.append(self._leftovers(mode, "kproxy_retire", settings=settings))
        return values.Leftovers.merged(found, mode)

    def supersede(self, mode: str, *, dry_run: bool) -> values.Leftovers:
        """Remove kube-proxy's leftovers of *mode*, which serves. Raises UnknownMode or PluginRefused."""
        found = [self._leftovers(layer, "kproxy_supersede", dry_run=dry_run) for layer in self.layers(mode)]
        return values.Leftovers.merged(found, mode)

    def _leftovers(self, mode: str, hook: str, **arguments: Any) -> values.Leftovers:
        """Return the merged answers to *hook*."""
        try:
            return values.Leftovers.merged(self._answers(mode, hook, logged=False, **arguments), mode)
        except (BackendError, HostError) as error:
            return values.Leftovers(errors=(_reason(error),), mode=mode)

    def _ask(self, mode: str, hook: str, **arguments: Any) -> Any:
        """Return the answer of the plugin for *mode*, or else of an observer."""
        answers = self._answers(mode, hook, **arguments)
        return answers[-1] if answers else None

    def _answers(self, mode: str, hook: str, *, logged: bool = True, **arguments: object) -> list[Any]:
        """Return the answers of the plugin for *mode* and of observers. That of the plugin is the last."""
        self.load(mode)
        answers: list[Any] = self._call(mode, hook, arguments, logged=logged)
        return answers

    def _call(self, mode: str, hook: str, arguments: Mapping[str, object], **options: Any) -> Any:
        return self.calls.call(getattr(self._managers[mode].hook, hook), arguments, **options)

    def _implements(self, mode: str, hook: str) -> bool:
        manager = self._managers[mode]
        plugin = manager.get_plugin(mode)
        return any(caller.name == hook for caller in manager.get_hookcallers(plugin) or ())

    def _load_named(self, name: str, installed: Iterable[EntryPoint]) -> None:
        """Load the plugin installed under *name*, or else the module: a backend or an observer."""
        if name in self._offered:
            self.load(name)
            return
        for broken in self.broken:
            if broken.name == name:
                raise PluginRefused(str(broken))
        if name in self._observers:
            return
        try:
            plugin = import_named(name, installed)
            if not hasattr(plugin, "kproxy_describe"):
                if not self._observe(name, plugin):
                    raise PluginRefused("it has none of kproxy's hooks")
                return
            mode = plugin.kproxy_describe().mode
            if mode in self.modes:
                raise PluginRefused(f"mode {mode!r} is provided by another plugin")
            if mode in self._blocked:
                raise PluginRefused(f"mode {mode!r} is blocked by -p no:{mode}")
            self._add(plugin, mode)
        except PluginNotFound:
            raise
        except (Exception, SystemExit) as error:  # as in `load`
            raise PluginRefused(f"plugin {name!r} can't be used: {_reason(error)}") from error

    def _add(self, plugin: object, mode: str) -> values.Description:
        """Register *plugin* as that of *mode*. Raises PluginRefused, or any exception of the plugin."""
        description = _describe(plugin, mode)
        manager = _new_manager()
        _register(manager, plugin, mode, PLUGIN_HOOKS)
        manager.register(CoreSync(), name=plugin_of_backend(mode))
        for name, observer in self._observers.items():
            _register(manager, observer, name, ())
        self._managers[mode] = manager
        self.descriptions[mode] = description
        return description

    def _load_observer(self, entry: EntryPoint) -> None:
        try:
            self._observe(entry.name, entry.load())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in `load`
            self._refuse(entry, _reason(error))

    def _observe(self, name: str, plugin: object) -> bool:
        """Have *plugin* observe every mode. Return whether it has any hook. Raises PluginRefused."""
        checking = _new_manager()
        _register(checking, plugin, name, ())
        self._observers[name] = plugin
        for manager in self._managers.values():
            _register(manager, plugin, name, ())
        return bool(checking.get_hookcallers(plugin))

    def _refuse(self, entry: EntryPoint, problem: str) -> BrokenPlugin:
        broken = BrokenPlugin(entry.name, distribution_of(entry), problem)
        if broken not in self.broken:
            self.broken.append(broken)
        return broken


def _new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


def _register(manager: pluggy.PluginManager, plugin: object, name: str, required: Iterable[str]) -> None:
    """Register *plugin* if all its hooks are known and none of the *required* ones is missing."""
    hash(plugin)  # pluggy keeps sets of plugins
    try:
        manager.register(plugin, name=name)
        callers = {caller.name: caller for caller in manager.get_hookcallers(plugin) or ()}
        problems = [f"it lacks the hook {hook}" for hook in required if hook not in callers]
        problems += [
            f"it has a hook {hook}, unknown to this version of kproxy"
            for hook, caller in callers.items()
            if not caller.has_spec()
        ]
        if problems:
            raise PluginRefused("; ".join(problems))
    except BaseException:
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        raise


def _describe(plugin: object, mode: str) -> values.Description:
    """Return the description of *plugin*, checked before any other of its hooks is called."""
    describe = getattr(plugin, "kproxy_describe", None)
    if describe is None:
        raise PluginRefused("it lacks the hook kproxy_describe")
    try:
        description: values.Description = checked(describe(), values.Description)
    except WrongAnswer as error:
        raise PluginRefused(f"kproxy_describe {error}") from None
    major, minor = description.contract
    ours, last = values.CONTRACT
    if major != ours or minor > last:
        raise PluginRefused(f"it was written for contract {major}.{minor}, this kproxy offers {ours}.{last}")
    if description.mode != mode or not _MODE.fullmatch(mode):
        raise PluginRefused(f"its entry point is named {mode!r}, it calls itself {description.mode!r}")
    return description


def _no_answer(because: str) -> values.Requirement:
    return values.Requirement("an answer from the plugin", False, because)


def _reason(error: BaseException) -> str:
    text = one_line(error)
    return text if isinstance(error, (PluginRefused, PluginFailed)) else f"{type(error).__name__}: {text}"
