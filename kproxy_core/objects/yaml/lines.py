"""YAML as plain as kubectl writes it, read line by line: in a third of the time that libyaml's events take.

Plain are, in ASCII, block mappings and sequences of scalars on one line each, empty flow collections, and
literals of one line. Comments, escapes, anchors, tags and everything else are left to `documents`.
"""

import re
from functools import lru_cache
from typing import Any, Final

from kproxy_core.objects.yaml.scalars import plain_value

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
