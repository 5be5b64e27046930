"""Checks that a hook's answer has the type that `hookspecs` declares, fields and elements included. Pure."""

import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import chain
from typing import Any, Literal, NewType

from msgspec import Struct

from kproxy_core.backend import api, hookspecs

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
    return typing.get_type_hints(getattr(hookspecs, hook))["return"]


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
