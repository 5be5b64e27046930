"""``kproxy report``: one archive for a bug report, and answers from one on another machine."""

import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import click
import yaml

from kproxy_core.cli.inspection.kernel_state import kernel_state
from kproxy_core.cli.options import OBJECTS
from kproxy_core.config.flags import Flags, version_told
from kproxy_core.modes.control import NoProxy, RequestRefused, send_request

TOP = "kproxy-report"
"""The directory in the archive."""
_LARGEST = 512 << 20
"""Bytes of a member that is read."""
_SECRET = re.compile(r"token|password|secret|credential|client-?key|private", re.IGNORECASE)
_USER_INFO = re.compile(r"//[^/@\s]+@")

Json = Mapping[str, Any]


def contents(flags: Flags) -> Iterator[tuple[str, str]]:
    """Yield names and texts of everything that can be found out. What cannot is said in ``problems.txt``.

    Raises as `cli_errors` expects.
    """
    problems: list[str] = []
    about: Json = {}
    try:
        about = _described(flags) if OBJECTS & set(flags) else send_request({"do": "report"})
    except (NoProxy, RequestRefused) as error:
        problems.append(f"running proxy: {error}")
    yield "version.txt", f"{version_told('raw')}\n{platform.platform()}\n"
    yield "machine.json", _machine(flags)
    if about:
        node = {"mode": about["mode"], **about["node"]}
        yield "node.json", _text(node)
        yield "configuration.yaml", yaml.safe_dump(without_secrets(about["configuration"]), sort_keys=False)
        yield "objects/objects.json", _text({"kind": "List", "apiVersion": "v1", "items": about["objects"]})
        yield "plans.json", _text(about["plans"])
        for key in ("metrics", "log"):
            if about.get(key):
                yield f"{key}.txt", "\n".join(map(_cleaned, about[key])) + "\n"
    if about and not OBJECTS & set(flags):
        try:
            yield "diff.json", _text(send_request({"do": "diff"})["differences"])
        except (NoProxy, RequestRefused) as error:
            problems.append(f"diff: {error}")
    for name, text in kernel_state():
        yield f"kernel/{name}", text
    if problems:
        yield "problems.txt", "\n".join(problems) + "\n"


def _described(flags: Flags) -> Json:
    """Return a proxy's report on the objects of *flags*. Raises as `cli_errors` expects."""
    from kproxy_core.cli.inspection.objects import read_objects
    from kproxy_core.config.write import effective
    from kproxy_core.process.inspection.reporting import described

    with read_objects(flags, this_machine=True) as found:
        store = found.store
        return {"mode": found.instance.mode, "configuration": effective(found.config),
                **described(found.plans, store.services, store.all_slices(), store.origins)}  # fmt: skip


def new_name() -> str:
    """Return a name for an archive of this moment."""
    return time.strftime("kproxy-report-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime())


def create(path: str) -> BinaryIO:
    """Return a new file at *path*, readable by its owner only. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def write(file: BinaryIO, found: Iterator[tuple[str, str]]) -> list[str]:
    """Write the archive to *file*, which may be a pipe; return the names of its members. Raises OSError."""
    names = []
    with tarfile.open(fileobj=file, mode="w|gz") as archive:
        for name, text in found:
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"{TOP}/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o644
            archive.addfile(member, io.BytesIO(data))
            names.append(name)
    return names


@contextmanager
def opened(path: str) -> Iterator[tuple[Flags, Json]]:
    """Yield flags that mean the objects in an archive, and what it says about its node.

    Raises ClickException if the archive cannot be used.
    """
    try:
        with tarfile.open(path) as archive, TemporaryDirectory(prefix="kproxy-report-") as directory:
            node = json.loads(_member(archive, "node.json"))
            configuration = yaml.safe_load(_member(archive, "configuration.yaml"))
            configuration.pop("clientConnection", None)
            (Path(directory) / "configuration.yaml").write_text(yaml.safe_dump(configuration))
            manifests = Path(directory) / "objects"
            manifests.mkdir()
            (manifests / "objects.json").write_bytes(_member(archive, "objects/objects.json"))
            yield Flags(
                manifests=str(manifests), config=f"{directory}/configuration.yaml", mode=node["mode"],
                hostname_override=node["name"],
            ), node  # fmt: skip
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise click.ClickException(f"{path}: not a report of kproxy with objects: {reason}") from error


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(f"{TOP}/{name}")
    file = archive.extractfile(member)
    if file is None or member.size > _LARGEST:
        raise ValueError(f"{name} is not a file, or is too large")
    return file.read()


def without_secrets(value: Any) -> Any:
    """Return *value* without the values of secret keys, and URLs without user names."""
    match value:
        case dict():
            return {key: "(left out)" if _SECRET.search(str(key)) and item else without_secrets(item)
                    for key, item in value.items()}  # fmt: skip
        case list() | tuple():
            return [without_secrets(item) for item in value]
        case str():
            return _cleaned(value)
    return value


def _cleaned(text: str) -> str:
    return _USER_INFO.sub("//", text)


def _machine(flags: Flags) -> str:
    from kproxy_core.backend.registry import Registry
    from kproxy_core.cli.modes import find_out, formatted
    from kproxy_core.process.terms import Configuration

    configuration = Configuration.read(flags)
    registry = Registry(plugins=configuration.of("").kproxy.plugins)
    return formatted(find_out(registry, "", configuration, load_modules=False), "json") + "\n"


def _text(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
