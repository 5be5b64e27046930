"""The JSON schema of the chart's value ``config``, made of the configuration's own types and rules.

``python -m tests.deploy.schema`` writes it into ``values.schema.json``.
"""

import json
import typing
from collections.abc import Iterator
from importlib.metadata import distribution
from typing import Any

import msgspec

from kproxy_core.config.check import RULES
from kproxy_core.config.file import KubeProxyConfiguration
from kproxy_core.config.settings import DetectLocalMode
from kproxy_core.contract.hooks import ENTRY_POINTS
from kproxy_core.model.duration import Duration, NumberOrDuration
from tests.deploy.objects import CHART, Object

FILE = CHART / "values.schema.json"

_LINE = 110
_DURATION = r"^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$"
"""`kproxy_core.model.duration`, in the syntax of Go's package regexp."""
_DEFINITIONS: Object = {
    "duration": {"type": "string", "pattern": _DURATION},
    "durationOrNanoseconds": {"type": ["string", "integer"], "pattern": _DURATION},
    "int32": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
}


def config_schema() -> Object:
    """Return the schema of ``config``. A list of plugins in it may bring modes of other authors."""
    schema = _section(KubeProxyConfiguration)
    for path, allowed in _rules():
        at = _at(schema, path)
        at.clear()
        at.update(allowed)
    modes = sorted(entry.name for entry in distribution("kproxy").entry_points.select(group=ENTRY_POINTS))
    switch_modes = {"switchModes": {"items": {"enum": modes}}}
    installed = {"mode": {"enum": ["", *modes]}, "kproxy": {"properties": switch_modes}}
    return schema | {
        "description": "Fields of KubeProxyConfiguration; python -m tests.deploy.schema writes this.",
        "if": {"properties": {"kproxy": {"required": ["plugins"]}}, "required": ["kproxy"]},
        "then": {},
        "else": {"properties": installed},
    }


def _section(kind: type[msgspec.Struct]) -> Object:
    properties = {
        field.encode_name: _section(type(field.default)) if isinstance(field.default, msgspec.Struct)
        else _type(field.type) for field in msgspec.structs.fields(kind)
    }  # fmt: skip
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _type(kind: Any) -> Object:
    of = typing.get_args(kind)
    if of and isinstance(of[0], type) and issubclass(of[0], msgspec.Struct):
        return {"type": "array", "items": _section(of[0])}
    schema = msgspec.json.schema(kind, schema_hook=_duration)
    if "anyOf" in schema:
        # null is how kube-proxy writes a list that is not set.
        types = [choice["type"] for choice in schema["anyOf"] if "type" in choice]
        schema = {name: value for choice in schema["anyOf"] for name, value in choice.items()}
        return {"$ref": schema["$ref"]} if "$ref" in schema else schema | {"type": types}
    return {"$ref": "#/definitions/int32"} if schema == _DEFINITIONS["int32"] else schema


def _duration(kind: type) -> Object:
    assert issubclass(kind, Duration)
    name = "durationOrNanoseconds" if kind is NumberOrDuration else "duration"
    return {"$ref": f"#/definitions/{name}"}


def _rules() -> Iterator[tuple[str, Object]]:
    """Yield the path of each field whose rule is a list or a range of values, and that in a schema."""
    for path, is_valid, _ in RULES:
        values = getattr(is_valid, "__self__", None)
        if isinstance(values, range):
            yield path, {"type": "integer", "minimum": values[0], "maximum": values[-1]}
        elif isinstance(values, tuple):
            yield path, {"enum": list(values)}
    yield "detectLocalMode", {"enum": ["", *(mode.value for mode in DetectLocalMode)]}


def _at(schema: Object, path: str) -> Object:
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def text(value: object, indent: str = "") -> str:
    """Return *value* as JSON: an object or list is on one line where that fits."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) < _LINE or not isinstance(value, dict | list):
        return line
    inner = f"{indent}  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + text(each, inner) for each in value) + f"\n{indent}]"
    lines = (f"{inner}{json.dumps(name)}: {text(each, inner)}" for name, each in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def updated() -> str:
    """Return what the chart's schema has to be."""
    schema: Object = json.loads(FILE.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    schema["definitions"] |= _DEFINITIONS
    return text(schema) + "\n"


if __name__ == "__main__":
    FILE.write_text(updated(), encoding="utf-8")
