"""Calls of plugins: checked answers, failures that are named and counted, and the core's handle of one
backend.
"""

import enum
import logging
import re
import threading
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial, wraps
from itertools import chain
from traceback import walk_tb
from typing import Any, Concatenate, Literal, NamedTuple, NewType, ParamSpec, TypeVar, cast

from msgspec import Struct
from pluggy import HookCaller, HookImpl, HookRelay

from kproxy_core.contract import hooks, values
from kproxy_core.contract.backend import Backend
from kproxy_core.contract.errors import BackendError, PluginFailed, one_line
from kproxy_core.contract.values import Measurement
from kproxy_core.linux.errors import HostError

# Checks that an answer has the type that the contract declares, fields and elements included. Pure.

_LARGEST_COUNT = 1 << 53
"""Metrics are floats, which hold every whole number up to this one."""
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

_ACCEPTED: Mapping[Any, Any] = {
    float: (float, int), bool: (bool, int), Sequence: (list, tuple), frozenset: AbstractSet,
}
"""Classes that will do besides the one that is declared."""


class WrongAnswer(Exception):
    """The answer is not what the contract says; the message completes a sentence about the hook."""


_Check = Callable[[Collection[Any]], str]
"""Returns what is wrong with one of several values of a type; "" if all are right.

A reading of counts has ten thousands of elements, so that each field is checked for all of them at once.
"""


@cache
def declared(function: Callable[..., Any]) -> Any:
    """Return the type that a hook or a method returns, as declared."""
    return typing.get_type_hints(function)["return"]


def checked(answer: Any, wanted: Any) -> Any:
    """Return *answer*, and what a generator yields as a tuple. Raises WrongAnswer if it is not *wanted*."""
    if answer is None and types.NoneType in typing.get_args(wanted):
        return None
    if not isinstance(answer, (list, tuple)) and _is_sequence(wanted):
        try:
            answer = tuple(answer)
        except TypeError:
            raise WrongAnswer(f"returned {_name(type(answer))}, not a sequence") from None
    if isinstance(answer, types.GeneratorType):
        raise WrongAnswer("returned a generator: only a hook with @hookimpl(wrapper=True) may yield")
    if problem := _check(wanted)((answer,)):
        raise WrongAnswer(f"returned {problem}")
    kind = typing.get_origin(wanted) or wanted
    return kind(answer) if kind in _ACCEPTED and kind is not Sequence else answer


@cache
def _is_sequence(wanted: Any) -> bool:
    """Return whether *wanted* is a type of sequences, or one of these or None."""
    return any(typing.get_origin(kind) is Sequence for kind in (wanted, *typing.get_args(wanted)))


@cache
def _check(wanted: Any) -> _Check:
    """Return the check of the type *wanted*."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is types.NoneType or getattr(wanted, "_is_protocol", False):
        return lambda values: ""
    if isinstance(wanted, NewType):
        return _check(wanted.__supertype__)
    if origin in (typing.Union, types.UnionType):
        kinds = [_check(argument) for argument in arguments if argument is not types.NoneType]
        if len(kinds) > 1:  # Such answers are single values.
            return lambda values: next((
                f"{value!r:.60}, not {_name(wanted)}" for value in values
                if all(problem_of((value,)) for problem_of in kinds)), "")
        (present,) = kinds
        return lambda values: present([value for value in values if value is not None])
    if origin is Literal:
        return lambda values: next((f"{value!r:.60}" for value in values if value not in arguments), "")
    inner = _check_inside(wanted, origin, arguments)
    kind = _ACCEPTED.get(origin or wanted, origin or wanted)

    def check(values: Collection[Any]) -> str:
        for found in set(map(type, values)):
            if not issubclass(found, kind):
                return f"{_name(found)}, not {_name(wanted)}"
        return inner(values) if inner is not None and values else ""

    return check


def _check_inside(wanted: Any, origin: Any, arguments: tuple[Any, ...]) -> _Check | None:
    """Return the check of the elements or fields of values of the type *wanted*; None: it has none."""
    if origin is not None and issubclass(origin, Mapping):
        of_keys, of_values = map(_check, arguments)
        return lambda values: (
            _within("a key that is ", of_keys(list(chain.from_iterable(values))))
            or _within("a value that is ", of_values([one for value in values for one in value.values()])))
    if origin is tuple and arguments[-1:] != (...,):
        return lambda values: (
            f"not {len(arguments)} elements" if any(len(value) != len(arguments) for value in values)
            else _first(_check(of)(column) for of, column in zip(arguments, zip(*values, strict=True),
                                                                 strict=True)))
    if origin is not None:
        of_elements = _check(arguments[0])
        return lambda values: _within("with ", of_elements(list(chain.from_iterable(values))))
    if not issubclass(wanted, (Struct, tuple)):
        return None
    fields = [(name, _check(of)) for name, of in typing.get_type_hints(wanted).items()]
    rule = _RULES.get(wanted, lambda values: "")

    def check(values: Collection[Any]) -> str:
        columns: Iterable[Any] = zip(*values, strict=True) if issubclass(wanted, tuple) else (
            [getattr(value, name) for value in values] for name, _ in fields)
        problems = (_within(f"{wanted.__name__}.{name}: ", of(column))
                    for (name, of), column in zip(fields, columns, strict=True))
        return _first(problems) or rule(values)

    return check


def _within(where: str, problem: str) -> str:
    return f"{where}{problem}" if problem else ""


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)) if typing.get_origin(kind) is None else str(kind)


def _bad_connections(connections: Collection[values.Connections]) -> str:
    kinds = {"failed": values.Failure, "carried": values.Carried, "handshakes": values.Handshake}
    for field, kind in kinds.items():
        parts = [part for value in connections if (part := getattr(value, field))]
        if not set(map(len, parts)) <= {len(kind)}:
            return f"Connections.{field}: not {len(kind)} numbers, nor none"
        if _beyond(chain.from_iterable(parts)):
            return f"Connections.{field}: a number beyond 0 to 2^53"
    is_beyond = _beyond(value.number for value in connections)
    return "Connections.number: beyond 0 to 2^53" if is_beyond else ""


def _beyond(numbers: Iterable[int]) -> bool:
    found = list(numbers)
    return bool(found) and not 0 <= min(found) <= max(found) <= _LARGEST_COUNT


def _bad_measurements(measurements: Collection[values.Measurement]) -> str:
    for value in measurements:
        if not _METRIC.fullmatch(value.name):
            return f"Measurement.name: {value.name!a:.60}, not a Prometheus name"
        for label in value.labels:
            if not _LABEL.fullmatch(label):
                return f"Measurement.labels: {label!a:.60}, not a Prometheus name"
    return ""


_RULES: Mapping[Any, Callable[[Any], str]] = {
    values.Connections: _bad_connections, values.Measurement: _bad_measurements,
}


# Calls of plugins. One that breaks the contract is named and counted, and only that call fails.

log = logging.getLogger("kproxy.run")

_TYPED = (BackendError, HostError)
"""What most calls may raise."""


class _Called(NamedTuple):
    """What is called, for the case that it fails."""

    hook: str
    """The hook, or the backend's method."""
    plugins: tuple[str, ...]
    """Those that may have given a wrong answer."""
    functions: Sequence[tuple[str, object]]
    """The implementations, by plugin: in one of these an exception was raised."""

    @classmethod
    def of(cls, caller: HookCaller) -> "_Called":
        impls = caller.get_hookimpls()
        return cls(caller.name, tuple(impl.plugin_name for impl in impls),
                   [(impl.plugin_name, impl.function) for impl in impls])


class HookCalls:
    """Calls hooks and backends of any plugin, and remembers which of them fail. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: Counter[tuple[str, str]] = Counter()
        """By plugin and hook."""
        self._failing: dict[tuple[str, str], str] = {}
        """Problems that were logged, until the hook works again."""

    def measure(self) -> list[Measurement]:
        with self._lock:
            failures = list(self._failures.items())
        return [
            Measurement("kproxy_plugin_failures_total", "Calls of plugins that raised an unexpected exception"
                        " or returned a wrong type", "counter", number, {"plugin": plugin, "hook": hook})
            for (plugin, hook), number in failures
        ]  # fmt: skip

    def call(self, caller: HookCaller, arguments: Mapping[str, object], **options: Any) -> Any:
        """Return the answer to a hook, or the list of answers, checked. For *options* see `guard`."""
        return self.guard(_Called.of(caller), lambda: _checked(caller, caller(**arguments)), **options)

    def guard(
        self, called: _Called, call: Callable[[], Any], *, may_raise: tuple[type[Exception], ...] = _TYPED,
        problem_of: Callable[[Any], str] = lambda answer: "", logged: bool = True,
    ) -> Any:
        """Return what *call* returns, which checks its type.

        Raises PluginFailed for any exception that is none of *may_raise*, and for a wrong answer: one of
        another type, or with a *problem_of* it. *logged*: log it, too, with the traceback.
        """
        try:
            answer = call()
            if problem := problem_of(answer):
                raise WrongAnswer(problem)
        except may_raise:
            raise
        except KeyboardInterrupt:
            raise
        except WrongAnswer as error:
            raise self.failed(" or ".join(called.plugins), called.hook, str(error), logged=logged) from error
        except BaseException as error:  # foreign code may raise anything
            problem = f"raised {type(error).__name__}: {one_line(error)}"
            raise self.failed(_culprit(called, error), called.hook, problem, error, logged=logged) from error
        if self._failing:
            self._works(called)
        return answer

    def call_each(self, caller: HookCaller) -> list[Any]:
        """Return the answers of all plugins, without those of the ones that fail, which is logged."""
        try:
            return list(self.call(caller, {}, may_raise=()))
        except PluginFailed:
            return [answer for impl in caller.get_hookimpls() if not (impl.wrapper or impl.hookwrapper)
                    for answer in self._attempt(caller, impl)]

    def failed(
        self, plugin: str, hook: str, problem: str, error: BaseException | None = None, *, logged: bool = True
    ) -> PluginFailed:
        """Count a failed call, and return the exception to be raised. *error*: what the hook raised."""
        with self._lock:
            self._failures[plugin, hook] += 1
            is_new = logged and self._failing.get((plugin, hook)) != problem
            if is_new:
                self._failing[plugin, hook] = problem
        if is_new:
            log.error("plugin failed", exc_info=error, extra={
                "fields": {"plugin": plugin, "hook": hook, "problem": problem}})
        return PluginFailed(plugin, hook, problem)

    def _attempt(self, caller: HookCaller, impl: HookImpl) -> list[Any]:
        """Return the answer of one implementation that takes no arguments; [] if it fails."""
        called = _Called(caller.name, (impl.plugin_name,), [(impl.plugin_name, impl.function)])
        wanted = declared(getattr(hooks, caller.name))
        try:
            return [self.guard(called, lambda: checked(impl.function(), wanted), may_raise=())]
        except PluginFailed:
            return []

    def _works(self, called: _Called) -> None:
        with self._lock:
            for plugin in called.plugins:
                self._failing.pop((plugin, called.hook), None)


def _checked(caller: HookCaller, answer: Any) -> Any:
    """Return *answer*, or the list of answers. Raises WrongAnswer, or what a generator raises."""
    wanted = declared(getattr(hooks, caller.name))
    if caller.spec is not None and not caller.spec.opts["firstresult"]:
        return [checked(one, wanted) for one in answer]
    return None if answer is None else checked(answer, wanted)


def _culprit(called: _Called, error: BaseException) -> str:
    """Return the plugin in whose implementation *error* was raised: the outer ones only pass it on."""
    names = {getattr(function, "__code__", None): plugin for plugin, function in called.functions}
    found = [names[frame.f_code] for frame, _ in walk_tb(error.__traceback__) if frame.f_code in names]
    return found[-1] if found else " or ".join(called.plugins)


# The core's handle of one backend.

def plugin_of_backend(mode: str) -> str:
    """Return the name under which failures of a backend of *mode* are told."""
    return f"{mode} backend"


class CoreSync:
    """The core's implementation of `hooks.kproxy_sync`, inside those of all observers."""

    @hooks.hookimpl(trylast=True)
    def kproxy_sync(self, backend: Backend, update: values.Update) -> values.SyncReport:
        return backend.sync(update)


P = ParamSpec("P")
R = TypeVar("R")


class _Raise(enum.Enum):
    IT = 0


def _lack_sides(
    sides: Sequence[values.KernelSide] | None, questions: Sequence[values.Question], *, live: bool
) -> str:
    if sides is None or len(sides) == len(questions):
        return ""
    return f"returned {len(sides)} answers to {len(questions)} questions"


def _guarded(
    method: Callable[Concatenate[Backend, P], R], *, otherwise: R | _Raise = _Raise.IT,
    problem_of: Callable[Concatenate[R, P], str] | None = None, logged: bool = True,
) -> Callable[Concatenate["BackendInstance", P], R]:
    """Return the guarded *method* of `Backend`, which is called, checked and typed as that is.

    *otherwise*: the answer in place of a failed call, which is logged; without one, PluginFailed is raised.
    *problem_of*: what is wrong with an answer of the right type, from it and the arguments. *logged*: see
    `HookCalls.guard`.
    """
    name = method.__name__
    may_raise = _TYPED if otherwise is _Raise.IT else ()

    @wraps(method)
    def call(self: "BackendInstance", /, *arguments: P.args, **named: P.kwargs) -> R:
        def answer() -> Any:
            of_backend = getattr(self.backend, name)
            if callbacks := _callbacks_of(method):
                of_backend = partial(self._call_with_checks, name, of_backend, callbacks)
            return checked(of_backend(*arguments, **named), declared(method))

        def problem(found: R) -> str:
            return "" if problem_of is None else problem_of(found, *arguments, **named)

        try:
            found: R = self._calls.guard(
                self._called[name], answer, may_raise=may_raise, problem_of=problem, logged=logged)
        except PluginFailed:
            if isinstance(otherwise, _Raise):
                raise
            return otherwise
        return found

    return call


class BackendInstance:
    """A backend, guarded: each method calls the backend's of the same name.

    A call that breaks the contract raises PluginFailed, or where nothing depends on it is only logged. During
    a switch of modes two instances exist.
    """

    def __init__(
        self, mode: str, settings: values.BackendSettings, layers: Mapping[str, Backend], hook: HookRelay,
        calls: HookCalls,
    ) -> None:
        """*layers*: the backend of *mode*, and before it its base's, if it has one, by mode.

        *hook* has the hooks of the plugin and of all observers.
        """
        self.mode = mode
        self.settings = settings
        """The settings that it was made with."""
        self.backend = layers[mode]
        self.hook = hook
        self._plugin = plugin_of_backend(mode)
        kinds = [(plugin_of_backend(layer), type(backend)) for layer, backend in layers.items()]
        self._called = {
            method: _Called(method, (self._plugin,), [(plugin, getattr(of, method)) for plugin, of in kinds])
            for method in METHODS
        }
        self._calls = calls

    begin = _guarded(Backend.begin)

    def sync(self, update: values.Update) -> values.SyncReport:
        """Call the hook `kproxy_sync`, which calls the backend."""
        caller = self.hook.kproxy_sync
        called = _Called.of(caller)
        called = called._replace(functions=[*called.functions, *self._called["sync"].functions])
        report = self._calls.guard(
            called, lambda: _checked(caller, caller(backend=self.backend, update=update)), problem_of=_lack)
        return cast(values.SyncReport, report)

    relays = _guarded(Backend.relays, otherwise=frozenset())
    reset_connections = _guarded(Backend.reset_connections)
    wants_relays = _guarded(Backend.wants_relays, otherwise=False)
    serves_on_loopback = _guarded(Backend.serves_on_loopback, otherwise=False)
    needs_interface_addresses = _guarded(Backend.needs_interface_addresses, otherwise=False)
    render = _guarded(Backend.render)
    check_text = _guarded(Backend.check_text)
    preview = _guarded(Backend.preview)
    explain = _guarded(Backend.explain, problem_of=_lack_sides)
    frontends = _guarded(Backend.frontends)
    traffic = _guarded(Backend.traffic)
    watch = _guarded(Backend.watch, otherwise=False)  # Its failure hides changes, no more.
    retire = _guarded(Backend.retire, logged=False)
    close = _guarded(Backend.close, otherwise=None)  # Its sockets end with the process.
    _measurements = _guarded(Backend.measure, otherwise=())

    def measure(self) -> Sequence[Sequence[values.Measurement]]:
        """Return the answers of the backend and of observers that have any, without those that fail."""
        return [*filter(None, [self._measurements()]), *self._calls.call_each(self.hook.kproxy_measure)]

    def _call_with_checks(
        self, method: str, call: Callable[..., Any], callbacks: Iterable["_Callback"], /, *arguments: Any,
        **named: Any,
    ) -> Any:
        """Call *method* with *callbacks* that check what the backend gives them."""
        given = list(arguments)
        for place, name, takes in callbacks:
            if name in named:
                named[name] = partial(self._call_back, method, named[name], takes)
            else:
                given[place] = partial(self._call_back, method, given[place], takes)
        return call(*given, **named)

    def _call_back(
        self, method: str, callback: Callable[..., None], wanted: Mapping[str, Any], /, *arguments: object,
        **named: object,
    ) -> None:
        """Call *callback*, unless the backend gives it something else than *wanted*, which is logged."""
        given = dict(zip(wanted, arguments, strict=False)) | named
        if len(arguments) + len(named) == len(wanted) and given.keys() == wanted.keys() and not any(
                _check(of)((given[name],)) for name, of in wanted.items()):
            callback(*map(given.__getitem__, wanted))
            return
        found = " and ".join(_name(type(each)) for each in (*arguments, *named.values()))
        problem = f"reported {found or 'nothing'}, not {' and '.join(map(_name, wanted.values()))}"
        self._calls.failed(self._plugin, method, problem)


class _Callback(NamedTuple):
    """A parameter of a method that the backend calls."""

    place: int
    name: str
    takes: Mapping[str, Any]
    """Types by name."""


@cache
def _callbacks_of(method: Callable[..., Any]) -> tuple[_Callback, ...]:
    hints = typing.get_type_hints(method)
    del hints["return"]
    return tuple(
        _Callback(place, name, {of: kind for of, kind in typing.get_type_hints(wanted.__call__).items()
                                if of != "return"})
        for place, (name, wanted) in enumerate(hints.items())
        if getattr(wanted, "_is_protocol", False) and "__call__" in vars(wanted))


METHODS = tuple(name for name in vars(Backend) if not name.startswith("_"))
"""The names of all methods of a backend."""


def _lack(answer: object) -> str:
    return "returned None" if answer is None else ""
