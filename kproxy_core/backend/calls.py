"""Calls of hooks. A plugin that breaks the contract is named and counted, and only that call fails."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from traceback import walk_tb
from typing import Any

from pluggy import HookCaller, HookImpl, PluginManager

from kproxy_core.backend.answers import WrongAnswer, checked, declared
from kproxy_core.backend.api import Measurement
from kproxy_core.backend.errors import BackendError, PluginFailed, one_line
from kproxy_core.host.errors import HostError

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
