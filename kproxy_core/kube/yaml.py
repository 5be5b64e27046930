"""YAML documents as plain dicts, lists, strings, numbers, booleans and None.

Built from libyaml's events: about twice as fast as PyYAML's own constructor, and safe with input from
anywhere: no recursion, no tags that make objects, aliases only as far as they stay small. Scalars
follow YAML 1.2, so that `on` and `2026-01-01` are strings; keys are strings always.

A caller may pause in the middle of a document, and no call keeps other threads from running for long.
"""

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

TOO_DEEP = "nested too deeply"
MAX_DEPTH = 100
"""Limit for nesting, far above that of any API object."""
MAX_NODES = 1_000_000
"""Limit for the values and collections in one document: about 100 MB of memory, for a moment."""
MAX_ALIASED = 100_000
"""Limit for the nodes that all aliases of one file stand for."""

_STEP = 250
"""Events between two pauses: about 3 ms."""

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = frozenset({"!", f"{_TAG}str"})
_SCALAR_TAGS = frozenset(f"{_TAG}{name}" for name in ("null", "bool", "int", "float"))
_COLLECTION_TAGS = frozenset({None, "!", f"{_TAG}map", f"{_TAG}seq"})

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_NUMERIC = frozenset("-+.0123456789")
_number = re.compile(r"""
    ([-+]?(?:0|[1-9][0-9]{0,17}))  # as an int, like the next two
  | 0o?([0-7]{1,20})
  | 0x([0-9a-fA-F]{1,15})
  | [-+]?(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)? | [-+]?\.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN)
    """, re.VERBOSE).fullmatch
_BASES = (10, 8, 16)


class NotYaml(ValueError):
    """The text is not YAML, or uses more of YAML than an API object needs."""


class _Key:
    """Marker of a mapping that expects a key."""


class Unfinished:
    """Stands for a document of which more is to be read."""


class _Stream:
    """Hands the text to libyaml in pieces of 16 KiB, between which other threads may run.

    libyaml holds the interpreter's lock until it has the next event: for 16 MiB of comments, 0.4 s.
    """

    name = "<byte string>"

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._read = 0

    def read(self, size: int = -1, /) -> bytes:
        start, self._read = self._read, self._read + size
        return bytes(self._data[start:self._read])


def documents(data: bytes) -> Iterator[Any]:
    """Yield the documents in *data*, one value each, and `Unfinished` every few milliseconds in between.

    Raises NotYaml, perhaps after some of them.
    """
    import yaml  # a directory of JSON files needs none

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        yield from _build(loader(_Stream(data)).get_event, yaml)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1})" if mark else ""
        problem = error.problem or error.context or "not YAML"
        if "nesting depth" in problem:  # libyaml of PyYAML 6.0.4 and newer has a limit of its own
            problem = TOO_DEEP
        raise NotYaml(f"{problem}{where}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        problem = " ".join(str(error).split()).replace(' in "<byte string>",', " at")
        raise NotYaml(problem) from error


def _build(next_event: Callable[[], Any], yaml: ModuleType) -> Iterator[Any]:
    scalar_event, alias_event, stream_end = yaml.ScalarEvent, yaml.AliasEvent, yaml.StreamEndEvent
    starts = {yaml.SequenceStartEvent: list, yaml.MappingStartEvent: dict}
    ends = (yaml.SequenceEndEvent, yaml.MappingEndEvent)
    document: list[Any] = []
    here: Any = document  # the collection that gets the next value
    key: Any = None  # if that is a dict: the value's key, or _Key if a key is next
    outer: list[tuple[Any, Any, str | None, int]] = []
    anchors: dict[str, tuple[Any, int]] = {}
    nodes = aliased = events = 0
    while True:
        event = next_event()
        kind = event.__class__
        nodes += 1
        events += 1
        if not events % _STEP:
            yield Unfinished
        if kind is scalar_event:
            value = event.value
            if key is not _Key and not event.implicit[1]:
                value = _scalar(event)
            if event.anchor is not None:
                anchors[event.anchor] = (value, 1)
        elif kind in starts:
            if event.tag not in _COLLECTION_TAGS:
                raise _unusable(event, f"tag {event.tag[:60]!a} is not supported")
            outer.append((here, key, event.anchor, nodes))
            if len(outer) > MAX_DEPTH:
                raise _unusable(event, TOO_DEEP)
            here = starts[kind]()
            key = _Key if here.__class__ is dict else None
            continue
        elif kind in ends:
            value = here
            here, key, anchor, start = outer.pop()
            if anchor is not None:
                anchors[anchor] = (value, nodes - start)
        elif kind is alias_event:
            if event.anchor not in anchors:
                raise _unusable(event, f"alias {event.anchor[:60]!a} names nothing complete before it")
            value, size = anchors[event.anchor]
            nodes += size
            aliased += size
            if aliased > MAX_ALIASED:
                raise _unusable(event, f"aliases stand for more than {MAX_ALIASED} nodes")
        elif kind is stream_end:
            return
        else:  # the start or end of a document
            yield from document
            document.clear()
            anchors.clear()
            nodes = aliased = 0
            continue
        if nodes > MAX_NODES:
            raise _unusable(event, f"a document of more than {MAX_NODES} nodes")
        if key is None:
            here.append(value)
        elif key is _Key:
            if value.__class__ is not str:
                raise _unusable(event, "a key that is not a string")
            key = value
        else:
            if key == "<<":
                _merge(here, value, event)
            else:
                here[key] = value
            key = _Key


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.tag is not None:
        if event.tag in _TEXT_TAGS:
            return text
        if event.tag not in _SCALAR_TAGS:
            raise _unusable(event, f"tag {event.tag[:60]!a} is not supported")
    return _plain_value(text)


def _plain_value(text: str) -> Any:
    """Return the value of an unquoted scalar by YAML 1.2's core schema, octal numbers as in YAML 1.1."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in _NUMERIC and (found := _number(text)):
        if found.lastindex:
            return int(found[found.lastindex], _BASES[found.lastindex - 1])
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _merge(mapping: dict[str, Any], value: Any, event: Any) -> None:
    """Add the entries that the merge key ``<<`` refers to; the mapping's own keys take precedence."""
    for source in value if isinstance(value, list) else [value]:
        if not isinstance(source, dict):
            raise _unusable(event, "a merge key (<<) without a mapping")
        for key, inherited in source.items():
            mapping.setdefault(key, inherited)


def _unusable(event: Any, problem: str) -> NotYaml:
    return NotYaml(f"{problem} (line {event.start_mark.line + 1})")
