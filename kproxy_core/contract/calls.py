"""Calls of hooks: checked answers, failures that are named and counted, and the core's handle of one
backend.
"""

import logging
import re
import threading
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import chain
from traceback import walk_tb
from typing import Any, Literal, NewType, cast

from msgspec import Struct
from pluggy import HookCaller, HookImpl, PluginManager

from kproxy_core.contract import hooks, values
from kproxy_core.contract import values as api
from kproxy_core.contract.errors import BackendError, PluginFailed, one_line
from kproxy_core.contract.values import Measurement
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import Frontend

# Checks that a hook's answer has the type that `hookspecs` declares, fields and elements included. Pure.

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
def declared(hook: str) -> Any:
    """Return the type that *hook* returns, as declared."""
    return typing.get_type_hints(getattr(hooks, hook))["return"]


def checked(answer: Any, wanted: Any) -> Any:
    """Return *answer*, and what a generator yields as a tuple. Raises WrongAnswer if it is not *wanted*."""
    if not isinstance(answer, (list, tuple)) and typing.get_origin(wanted) is Sequence:
        try:
            answer = tuple(answer)
        except TypeError:
            raise WrongAnswer(f"returned {_name(type(answer))}, not a sequence") from None
    if isinstance(answer, types.GeneratorType):
        raise WrongAnswer("returned a generator: a hook that wraps others needs @hookimpl(wrapper=True)")
    if problem := _check(wanted)((answer,)):
        raise WrongAnswer(f"returned {problem}")
    return answer


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


def _bad_connections(values: Collection[api.Connections]) -> str:
    for field, kind in (("failed", api.Failure), ("carried", api.Carried), ("handshakes", api.Handshake)):
        parts = [part for value in values if (part := getattr(value, field))]
        if not set(map(len, parts)) <= {len(kind)}:
            return f"Connections.{field}: not {len(kind)} numbers, nor none"
        if _beyond(chain.from_iterable(parts)):
            return f"Connections.{field}: a number beyond 0 to 2^53"
    return "Connections.number: beyond 0 to 2^53" if _beyond(value.number for value in values) else ""


def _beyond(numbers: Iterable[int]) -> bool:
    found = list(numbers)
    return bool(found) and not 0 <= min(found) <= max(found) <= _LARGEST_COUNT


def _bad_measurements(values: Collection[api.Measurement]) -> str:
    for value in values:
        if not _METRIC.fullmatch(value.name):
            return f"Measurement.name: {value.name!a:.60}, not a Prometheus name"
        for label in value.labels:
            if not _LABEL.fullmatch(label):
                return f"Measurement.labels: {label!a:.60}, not a Prometheus name"
    return ""


_RULES: Mapping[Any, Callable[[Any], str]] = {
    api.Connections: _bad_connections, api.Measurement: _bad_measurements,
}


# Calls of hooks. A plugin that breaks the contract is named and counted, and only that call fails.

log = logging.getLogger("kproxy.run")

_TYPED = (BackendError, HostError)
"""What most hooks may raise."""


class HookCalls:
    """Calls hooks of any plugin, and remembers which of them fail. Any thread may call."""

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

    def call(
        self, caller: HookCaller, arguments: Mapping[str, object], *,
        may_raise: tuple[type[Exception], ...] = _TYPED, problem_of: Callable[[Any], str] = lambda answer: "",
        logged: bool = True,
    ) -> Any:
        """Return the answer to a hook, or the list of answers, checked.

        Raises PluginFailed for any exception that is none of *may_raise*, and for a wrong answer: one of
        another type, or with a *problem_of* it. *logged*: log it, too, with the traceback.
        """
        hook = caller.name
        try:
            answer = _checked(caller, caller(**arguments))
            if problem := problem_of(answer):
                raise WrongAnswer(problem)
        except may_raise:
            raise
        except KeyboardInterrupt:
            raise
        except WrongAnswer as error:
            raise self.failed(_names(caller.get_hookimpls()), hook, str(error), logged=logged) from error
        except BaseException as error:  # foreign code may raise anything
            problem = f"raised {type(error).__name__}: {one_line(error)}"
            raise self.failed(_culprit(caller, error), hook, problem, error, logged=logged) from error
        if self._failing:
            self._works(caller)
        return answer

    def call_each(self, manager: PluginManager, hook: str) -> list[Any]:
        """Return the answers of all plugins, without those of the ones that fail, which is logged."""
        caller: HookCaller = getattr(manager.hook, hook)
        try:
            return list(self.call(caller, {}, may_raise=()))
        except PluginFailed:
            return [answer for alone in _each(manager, caller) for answer in self._attempt(alone)]

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

    def _attempt(self, caller: HookCaller) -> list[Any]:
        try:
            return list(self.call(caller, {}, may_raise=()))
        except PluginFailed:
            return []

    def _works(self, caller: HookCaller) -> None:
        with self._lock:
            for impl in caller.get_hookimpls():
                self._failing.pop((impl.plugin_name, caller.name), None)


def _checked(caller: HookCaller, answer: Any) -> Any:
    """Return *answer*, or the list of answers. Raises WrongAnswer, or what a generator raises."""
    wanted = declared(caller.name)
    if caller.spec is not None and not caller.spec.opts["firstresult"]:
        return [checked(one, wanted) for one in answer]
    return None if answer is None else checked(answer, wanted)


def _culprit(caller: HookCaller, error: BaseException) -> str:
    """Return the plugin in whose implementation *error* was raised: wrappers only pass it on."""
    names = {getattr(impl.function, "__code__", None): impl.plugin_name for impl in caller.get_hookimpls()}
    found = [names[frame.f_code] for frame, _ in walk_tb(error.__traceback__) if frame.f_code in names]
    return found[-1] if found else _names(caller.get_hookimpls())


def _names(impls: list[HookImpl]) -> str:
    return " or ".join(impl.plugin_name for impl in impls)


def _each(manager: PluginManager, caller: HookCaller) -> Iterator[HookCaller]:
    """Yield a caller for each plugin alone that implements the hook."""
    plugins = [impl.plugin for impl in caller.get_hookimpls()]
    for impl in caller.get_hookimpls():
        if not (impl.wrapper or impl.hookwrapper):
            yield manager.subset_hook_caller(
                caller.name, [plugin for plugin in plugins if plugin is not impl.plugin])


# The core's handle of one backend.

class BackendInstance:
    """The hooks of work of one backend, with what observers wrap around them.

    Each method calls the hook of the same name, see `hookspecs`. False or None: the backend does not
    implement it. A call that breaks the contract raises PluginFailed, or where nothing depends on it is only
    logged. During a switch of modes two instances exist; each call reaches only one of them.
    """

    def __init__(
        self, mode: str, settings: values.BackendSettings, backends: tuple[object, ...],
        manager: PluginManager, calls: HookCalls,
    ) -> None:
        """*backends*: the base's first, where the mode has one. No others are registered in *manager*."""
        self.mode = mode
        self.settings = settings
        """The settings that it was made with."""
        self.backends = backends
        self.manager = manager
        self._calls = calls

    def begin(self) -> bool:
        return bool(self._call("kproxy_begin"))

    def sync(self, update: values.Update) -> values.SyncReport:
        report = self._call("kproxy_sync", {"update": update}, problem_of=_lack)
        return cast(values.SyncReport, report)

    def relays(self, family: Family, key: ServicePortKey) -> frozenset[int]:
        """Return the ports; none if the backend fails."""
        try:
            found = self._call("kproxy_relays", {"family": family, "key": key}, may_raise=())
        except PluginFailed:
            return frozenset()
        return frozenset(found or ())

    def render(self, update: values.Update) -> str:
        return str(self._call("kproxy_render", {"update": update}, problem_of=_lack))

    def check_text(self, update: values.Update) -> str | None:
        return cast(str | None, self._call("kproxy_check_text", {"update": update}))

    def preview(self, update: values.Update) -> values.Preview | None:
        return cast(values.Preview | None, self._call("kproxy_preview", {"update": update}))

    def explain(
        self, questions: Sequence[values.Question], *, live: bool
    ) -> Sequence[values.KernelSide] | None:
        def problem_of(sides: Sequence[values.KernelSide] | None) -> str:
            if sides is None or len(sides) == len(questions):
                return ""
            return f"returned {len(sides)} answers to {len(questions)} questions"

        sides = self._call("kproxy_explain", {"questions": questions, "live": live}, problem_of=problem_of)
        return cast(Sequence[values.KernelSide] | None, sides)

    def frontends(self, family: Family) -> Sequence[Frontend] | None:
        return cast(Sequence[Frontend] | None, self._call("kproxy_frontends", {"family": family}))

    def traffic(self, family: Family) -> Sequence[values.Connections] | None:
        return cast(Sequence[values.Connections] | None, self._call("kproxy_traffic", {"family": family}))

    def watch(self, damaged: values.Damage) -> bool:
        """Return False, too, if the backend fails: its failure hides changes, no more."""

        def checked(family: object, what: object) -> None:
            if isinstance(family, Family) and isinstance(what, str):
                damaged(family, what)
            else:
                found = f"{type(family).__name__} and {type(what).__name__}"
                name = self.manager.get_name(self.backends[-1]) or self.mode
                self._calls.failed(name, "kproxy_watch", f"reported {found}, not Family and str")

        try:
            return bool(self._call("kproxy_watch", {"damaged": checked}, may_raise=()))
        except PluginFailed:
            return False

    def measure(self) -> Sequence[Sequence[values.Measurement]]:
        """Return the answers of the backend and of observers, without those that fail."""
        return self._calls.call_each(self.manager, "kproxy_measure")

    def close(self) -> None:
        """Close the backend. A failure is logged: its sockets end with the process."""
        try:
            self._call("kproxy_close", may_raise=())
        except PluginFailed:
            return

    def _call(self, hook: str, arguments: Mapping[str, object] = {}, **options: Any) -> Any:
        """Return the answer to *hook*; see `HookCalls.call` for *options*."""
        return self._calls.call(getattr(self.manager.hook, hook), arguments, **options)


def _lack(answer: object) -> str:
    return "returned None" if answer is None else ""
