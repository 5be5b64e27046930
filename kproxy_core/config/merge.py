"""The merge of flags and file into one document. Messages name the flag that set a field."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from kproxy_core.config.file import FileConfig, Ipvs, KubeProxyConfiguration, Problem, VModule
from kproxy_core.config.flags import FLAGS, Flag, Flags, truth
from kproxy_core.model.duration import DefaultDuration, duration_from


class Merged(Struct):
    """The document of flags and file together, not checked yet."""

    document: KubeProxyConfiguration
    notices: list[str]
    problems: list[Problem] = field(default_factory=list)
    """Flags whose values have the wrong type."""
    origins: dict[str, str] = field(default_factory=dict)
    """The flag that set each field, by path."""
    healthz_port: int = 10256
    metrics_port: int = 10249
    no_health_server: bool = False

    def option(self, path: str) -> str:
        """Return the name of the flag that set the field at *path*, else the path."""
        path, bracket, index = path.partition("[")
        return self.origins.get(path, path) + bracket + index

    def as_given(self, problem: Problem) -> Problem:
        """Return *problem* under the name of the flag that set the field, if one did."""
        return problem._replace(option=self.option(problem.option))


def merge(flags: Flags, file: FileConfig | None) -> Merged:
    """Merge *flags* and *file*. As in kube-proxy, an empty text flag counts as not given."""
    if file:
        merged = Merged(file.document, list(file.notices))
    else:
        # The flags have one default for all modes; that of the file differs for this one.
        merged = Merged(KubeProxyConfiguration(ipvs=Ipvs(min_sync_period=DefaultDuration(1))), [])
        merged.origins = {path: f"--{flag.name}" for flag in FLAGS.values() for path in flag.fields}
    for parameter, flag in FLAGS.items():
        if flags.get(parameter):
            _take(merged, flag, flags[parameter], file is not None)
    if not file and not flags.get("write_config_to"):
        _take_ports(merged, flags)
    return merged


def _take(merged: Merged, flag: Flag, text: str, has_file: bool) -> None:
    option = f"--{flag.name}"
    if has_file and not flag.beside_a_file:
        merged.notices.append(f"{option} has no effect beside --config")
        return
    if flag.no_effect:
        merged.notices.append(f"{option} has no effect: {flag.no_effect}")
    for path in flag.fields:
        merged.origins[path] = option
        try:
            merged.document = _with(merged.document, path.split("."), text)
        except ValueError as error:
            merged.problems.append(Problem(option, text, str(error)))
            return


def _take_ports(merged: Merged, flags: Flags) -> None:
    """Apply the port flags of kube-proxy's first releases, which complete an address without a port."""
    for parameter in ("healthz_port", "metrics_port"):
        text = flags.get(parameter)
        if text is None:
            continue
        option = f"--{FLAGS[parameter].name}"
        if not (text.isascii() and text.isdigit() and int(text) < 65536):
            merged.problems.append(Problem(option, text, "must be a port"))
        elif int(text):
            if flags.get(f"{parameter[:-4]}bind_address"):
                setattr(merged, parameter, int(text))
        elif parameter == "healthz_port":
            merged.no_health_server = True
        else:
            merged.problems.append(Problem(option, text, "the metrics server cannot be disabled"))


def _with(section: Any, path: list[str], text: str) -> Any:
    """Return *section* with the field at *path*, in the spelling of the file, parsed from *text*.

    In a mapping, whose values have no types, *text* is the value. Raises ValueError.
    """
    name, *rest = path
    if isinstance(section, dict):
        return section | {name: _with(section.get(name, {}), rest, text) if rest else text}
    found = next(f for f in msgspec.structs.fields(section) if f.encode_name == name)
    before = getattr(section, found.name)
    value = _with(before, rest, text) if rest else _value(found, text, before)
    return msgspec.structs.replace(section, **{found.name: value})


def _value(found: msgspec.structs.FieldInfo, text: str, before: object) -> object:
    if isinstance(before, bool):
        return truth(text)
    if isinstance(before, str):
        return text
    if isinstance(before, dict):
        return before | dict(_gates(text.split(",")))
    if found.name == "vmodule" and isinstance(before, tuple):
        return (*_vmodule(text.split(",")), *before)
    if found.name == "plugins" and isinstance(before, tuple):
        return (*before, *text.split(","))
    if isinstance(before, tuple):
        return tuple(text.split(","))
    try:
        value: object = msgspec.convert(text, found.type, strict=False, dec_hook=duration_from)
    except msgspec.ValidationError as error:
        raise ValueError(_wanted(str(error))) from error
    return value


def _wanted(refusal: str) -> str:
    """Return the expectation behind msgspec's *refusal*, in our words."""
    if refusal.startswith(("Expected `int`", "Expected `float`")):
        return "must be a whole number" if "`int`" in refusal else "must be a number"
    return refusal.replace("`", "")


def _gates(pairs: Iterable[str]) -> Iterable[tuple[str, bool]]:
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ValueError("must be GATE=true or GATE=false, separated by commas")
        yield name.strip(), truth(value.strip())


def _vmodule(pairs: Iterable[str]) -> Iterable[VModule]:
    for pair in pairs:
        pattern, _, level = pair.partition("=")
        if not pattern or not (level.isascii() and level.isdigit()):
            raise ValueError("must be PATTERN=N, separated by commas")
        yield VModule(file_pattern=pattern, verbosity=int(level))
