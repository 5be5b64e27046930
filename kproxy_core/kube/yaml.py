"""YAML documents as plain dicts, lists, strings, numbers, booleans and None."""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

# The values of scalars that are not quoted.

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


def plain_value(text: str) -> Any:
    """Return the value of *text* by the core schema of YAML 1.2, and of octal numbers as in YAML 1.1."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in _NUMERIC and (found := _number(text)):
        if found.lastindex:
            return int(found[found.lastindex], _BASES[found.lastindex - 1])
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


# YAML as plain as kubectl writes it, read line by line: in a third of the time that libyaml's events
# take.
#
# Plain are, in ASCII, block mappings and sequences of scalars on one line each, empty flow collections,
# and literals of one line. Comments, escapes, anchors, tags and everything else are left to `documents`.

_MAX_BYTES = 1 << 18
_MAX_DEPTH = 50
"""Tighter limits than those of `documents`."""

_line = re.compile(r"""
    (\ *) (-\ )? (?: ([A-Za-z0-9_/][A-Za-z0-9_./-]*) : (?:\ (?=.)|\Z) )?
    (?: ( (?:[A-Za-z0-9_/.]|-[0-9]) [A-Za-z0-9_./+:-]* (?<!:) )
      | '([\x20-\x26\x28-\x7e]*)' | "([\x20\x21\x23-\x5b\x5d-\x7e]*)" | (\{\}|\[\]|\|) )?
    """, re.VERBOSE).fullmatch
_literal = re.compile(r"( *)([\x21-\x7e][\x20-\x7e]*)").fullmatch
_MAX_LINE = 500
"""Limit in characters for a line with a key, which YAML limits, and which is remembered."""


class _Below:
    """Marker of a null, or of a collection that begins on the next line."""


class _Literal:
    """Marker of a literal, which is the next line."""


_MARKS: Final[dict[str | None, type]] = {None: _Below, "{}": dict, "[]": list, "|": _Literal}


@lru_cache(maxsize=512)
def _parse(line: str) -> tuple[int, bool, str | None, Any] | None:
    """Return a line's column, if it has a "- ", its key, and its value or a class for it; None: not plain."""
    found = _line(line) if len(line) <= _MAX_LINE else None
    if found is None:
        return None
    indent, dash, key, plain, single, double, mark = found.groups()
    value: Any = _MARKS[mark]
    if plain is not None:
        value = plain_value(plain)
    elif single is not None or double is not None:
        value = single if double is None else double
    if key is None and value in (_Below, _Literal):
        return None
    return len(indent), dash is not None, key, value


def plain_documents(data: bytes) -> list[Any] | None:
    """Return the documents in *data*, each a mapping or a sequence; None if they are not plain."""
    if len(data) > _MAX_BYTES or not data.isascii() or not data.endswith(b"\n"):
        return None
    texts = data.decode("ascii").removeprefix("---\n").removesuffix("\n").split("\n---\n")
    found = [_document(text.split("\n")) for text in texts]
    return None if None in found else found


def _document(lines: list[str]) -> Any:
    root: dict[str, Any] = {"": None}
    here: Any = root  # the collection that gets the next value, and its column
    column = -1
    outer: list[tuple[Any, int]] = []
    below: str | None = ""  # the key in it whose value begins on the next line
    literal: str | None = None  # the key in it whose literal is the next line
    for line in lines:
        if literal is not None:
            found = _literal(line)
            if found is None or found.end(1) <= column:
                return None
            here[literal] = f"{found[2]}\n"
            literal = None
            continue
        parsed = _parse(line)
        if parsed is None:
            return None
        at, dash, key, value = parsed
        if below is not None and (at > column or (dash and at == column)):
            inner: Any = [] if dash else {}
            here[below] = inner
            outer.append((here, column))
            here, column = inner, at
        else:
            other = dict if dash else list
            while column > at or (column == at and here.__class__ is other):
                here, column = outer.pop()
        if column != at or len(outer) > _MAX_DEPTH:
            return None
        if dash and key is not None:
            inner = {}
            here.append(inner)
            outer.append((here, column))
            here, column = inner, at + 2
        below = None
        if value is _Below:
            value, below = None, key
        elif value is _Literal:
            literal = key
        elif value.__class__ is type:
            value = value()
        if key is not None:
            here[key] = value
        elif dash:
            here.append(value)
        else:
            return None
    return root[""] if literal is None else None


# YAML documents as plain dicts, lists, strings, numbers, booleans and None.
#
# Built from libyaml's events: about twice as fast as PyYAML's own constructor, and safe with input from
# anywhere: no recursion, no tags that make objects, aliases only as far as they stay small. Scalars
# follow YAML 1.2, so that `on` and `2026-01-01` are strings; keys are strings always.

TOO_DEEP = "nested too deeply"
MAX_DEPTH = 100
"""Limit for nesting, far above that of any API object."""
MAX_NODES = 1_000_000
"""Limit for the values and collections in one document: about 100 MB of memory, for a moment."""
MAX_ALIASED = 100_000
"""Limit for the nodes that all aliases of one file stand for."""

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = frozenset({"!", f"{_TAG}str"})
_SCALAR_TAGS = frozenset(f"{_TAG}{name}" for name in ("null", "bool", "int", "float"))
_COLLECTION_TAGS = frozenset({None, "!", f"{_TAG}map", f"{_TAG}seq"})


class NotYaml(ValueError):
    """The text is not YAML, or uses more of YAML than an API object needs."""


class _Key:
    """Marker of a mapping that expects a key."""


def documents(data: bytes) -> Iterator[Any]:
    """Yield the documents in *data*, one value each. Raises NotYaml, perhaps after some of them."""
    plain = plain_documents(data)
    yield from parsed_documents(data) if plain is None else plain


def parsed_documents(data: bytes) -> Iterator[Any]:
    """Do the same with libyaml, whatever *data* is."""
    import yaml  # importing it takes longer than reading a small directory

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        yield from _build(loader(data).get_event, yaml)
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
    nodes = aliased = 0
    while True:
        event = next_event()
        kind = event.__class__
        nodes += 1
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
    return plain_value(text)


def _merge(mapping: dict[str, Any], value: Any, event: Any) -> None:
    """Add the entries that the merge key ``<<`` refers to; the mapping's own keys take precedence."""
    for source in value if isinstance(value, list) else [value]:
        if not isinstance(source, dict):
            raise _unusable(event, "a merge key (<<) without a mapping")
        for key, inherited in source.items():
            mapping.setdefault(key, inherited)


def _unusable(event: Any, problem: str) -> NotYaml:
    return NotYaml(f"{problem} (line {event.start_mark.line + 1})")
