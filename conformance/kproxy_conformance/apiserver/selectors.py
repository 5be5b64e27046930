"""Label and field selectors of requests."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Json = dict[str, Any]
_Test = Callable[[Json], bool]


def label_tests(text: str) -> list[_Test]:
    """Return the tests in a selector like ``a,!b,c=d,e!=f,g in (h,i),j notin (k)`` consists
    of."""
    tests: list[_Test] = []
    for part in re.findall(r"(?:[^,(]|\([^)]*\))+", text):
        part = part.strip()
        m = re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", part)
        if m:
            key, values, want = m[1], {v.strip() for v in m[3].split(",")}, m[2] == "in"
            tests.append(partial(_is_in, key, values, want))
        elif "!=" in part:
            key, value = part.split("!=", 1)
            tests.append(partial(_is_in, key.strip(), {value.strip()}, False))
        elif "=" in part:
            key, value = re.split("==?", part, maxsplit=1)
            tests.append(partial(_is_in, key.strip(), {value.strip()}, True))
        elif part.startswith("!"):
            tests.append(partial(_has, part[1:].strip(), False))
        elif part:
            tests.append(partial(_has, part, True))
    return tests


def field_tests(text: str) -> list[_Test]:
    """Return the tests of objects that a selector like ``metadata.name=a,status.phase!=b`` consists of."""
    tests: list[_Test] = []
    for part in filter(None, text.split(",")):
        negate = "!=" in part
        path, value = part.split("!=", 1) if negate else re.split("==?", part, maxsplit=1)
        tests.append(partial(_is_at, path.strip().split("."), value.strip(), not negate))
    return tests


def _is_in(key: str, values: set[str], wanted: bool, labels: Json) -> bool:
    return (labels.get(key) in values) is wanted


def _has(key: str, wanted: bool, labels: Json) -> bool:
    return (key in labels) is wanted


def _is_at(path: list[str], value: str, wanted: bool, obj: Json) -> bool:
    found: Any = obj
    for key in path:
        found = found.get(key, "") if isinstance(found, dict) else ""
    return (found == value) is wanted


class Selector:
    """The objects that one request is about."""

    def __init__(
        self, query: Mapping[str, str], namespace: str | None = None, name: str | None = None
    ) -> None:
        self._labels = label_tests(query.get("labelSelector", ""))
        self._fields = field_tests(query.get("fieldSelector", ""))
        self._namespace, self._name = namespace, name

    def __call__(self, obj: Json) -> bool:
        meta = obj["metadata"]
        if self._namespace and meta.get("namespace") != self._namespace:
            return False
        if self._name and meta["name"] != self._name:
            return False
        labels = meta.get("labels") or {}
        return all(test(labels) for test in self._labels) and all(test(obj) for test in self._fields)
