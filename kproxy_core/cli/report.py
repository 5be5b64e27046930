"""``kproxy report``: the archive for a bug report, written and read."""

import errno
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import click
import yaml

from kproxy_core.app.control import send_request
from kproxy_core.app.errors import NoProxy, RequestRefused
from kproxy_core.app.requests import Diff, Report, Status
from kproxy_core.cli.options import OBJECTS, OUTPUT, VERBOSE, FlagCommand, given, with_flags
from kproxy_core.cli.run import Mistake, cli_errors
from kproxy_core.cli.terminal import encoded
from kproxy_core.config.flags import RULES, SOURCES, Flags, version_told
from kproxy_core.linux import programs
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.libnftables import list_tables
from kproxy_core.linux.modules import Modules, Presence

Json = Mapping[str, Any]

TOP = "kproxy-report"
"""The directory in the archive."""
_LARGEST = 512 << 20
"""Maximum size of a member that is read, in bytes."""
_SECRET = re.compile(r"token|password|secret|credential|client-?key|private", re.IGNORECASE)
_USER_INFO = re.compile(r"//[^/@\s]+@")

_COMMANDS = (
    # File, module that the command would load, command.
    ("iptables.txt", "", ("iptables-save", "-c")),
    ("ip6tables.txt", "", ("ip6tables-save", "-c")),
    ("ipset.txt", "ip_set", ("ipset", "list")),
    ("addresses.txt", "", ("ip", "address")),
    ("routes.txt", "", ("ip", "route", "show", "table", "all")),
    ("ipv6-routes.txt", "", ("ip", "-6", "route", "show", "table", "all")),
    ("routing-rules.txt", "", ("ip", "rule")),
)
_FILES = (
    ("ip_vs.txt", "/proc/net/ip_vs"),
    ("conntrack-statistics.txt", "/proc/net/stat/nf_conntrack"),
    ("sockets.txt", "/proc/net/sockstat"),
    ("modules.txt", "/proc/modules"),
)
_SYSCTLS = (
    "net/netfilter/*", "net/ipv4/vs/*", "net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding",
    "net/ipv4/conf/all/route_localnet",
)  # fmt: skip
"""Patterns below /proc/sys."""


def contents(flags: Flags) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the archive's files. Problems with reading them are in ``problems.txt``.

    Raises as `cli_errors` expects.
    """
    problems: list[str] = []
    about: Json = {}
    try:
        about = _described(flags) if OBJECTS & set(flags) else send_request(Report())
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
            yield "status.json", _text(send_request(Status()))
            yield "diff.json", _text(send_request(Diff())["differences"])
        except (NoProxy, RequestRefused) as error:
            problems.append(f"status and differences: {error}")
    yield "doctor.json", _doctor(about, is_running=not OBJECTS & set(flags))
    for name, text in kernel_state():
        yield f"kernel/{name}", text
    if problems:
        yield "problems.txt", "\n".join(problems) + "\n"


def _described(flags: Flags) -> Json:
    """Return a proxy's report on the objects of *flags*. Raises as `cli_errors` expects."""
    from kproxy_core.app import answers
    from kproxy_core.cli.objects import read_objects
    from kproxy_core.config.settings import effective

    with read_objects(flags, this_machine=True) as found:
        store = found.store
        told = answers.report(found, store.services, store.all_slices(), store.origins)
        return {"configuration": effective(found.config), **told}


def new_name() -> str:
    """Return a file name with the current time."""
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
    """Yield flags for the objects in the archive at *path*, and its description of the node.

    Raises Mistake if the archive cannot be used.
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
        raise Mistake(f"{path}: not a report of kproxy with objects: {reason}") from error


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(f"{TOP}/{name}")
    file = archive.extractfile(member)
    if file is None or member.size > _LARGEST:
        raise ValueError(f"{name} is not a file, or is too large")
    return file.read()


def without_secrets(value: Any) -> Any:
    """Return *value* without values whose keys look secret, and without user names in URLs."""
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
    from kproxy_core.cli.modes import find_out, formatted
    from kproxy_core.contract.registry import Registry
    from kproxy_core.modes.settings import Configuration

    configuration = Configuration.read(flags)
    registry = Registry(plugins=configuration.of("").kproxy.plugins)
    return formatted(find_out(registry, "", configuration, load_modules=False), "json") + "\n"


def _doctor(about: Json, *, is_running: bool) -> str:
    """Return what hurts the Services of a proxy's report *about* them, which is empty without any."""
    from kproxy_core.app.doctor import Services
    from kproxy_core.cli.doctor import examine

    services = Services.of(about["mode"], about["plans"], is_running=is_running) if about else None
    return _text(examine(services))


def _text(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def kernel_state() -> Iterator[tuple[str, str]]:
    """Yield file names and texts of the kernel's state. Loads no kernel module."""
    modules = Modules()

    def is_loaded(module: str) -> bool:
        return modules.presence(module) in (Presence.LOADED, Presence.BUILT_IN)

    if is_loaded("nf_tables"):
        yield "nft-ruleset.txt", _ruleset()
    for name, module, command in _COMMANDS:
        if (not module or is_loaded(module)) and programs.find(command[0]):
            yield name, _output(command)
    for name, path in _FILES:
        try:
            yield name, Path(path).read_text(errors="replace")
        except OSError:
            continue
    yield "sysctl.txt", "".join(_sysctls())


def _ruleset() -> str:
    """Return all tables as nft prints them, after a comment for each table that it cannot print."""
    try:
        text, unread = list_tables(style=["handle_output"])
    except HostError as error:
        return f"# {error}\n"
    return "".join(f"# {problem}\n" for problem in unread) + text


def _output(command: tuple[str, ...]) -> str:
    try:
        done = programs.run(*command)
    except HostError as error:
        return f"{error}\n"
    return done.stdout + (done.stderr if done.returncode else "")


def _sysctls() -> Iterator[str]:
    root = Path("/proc/sys")
    for path in (path for pattern in _SYSCTLS for path in sorted(root.glob(pattern))):
        try:
            yield f"{path.relative_to(root)} = {path.read_text(errors='replace').strip()}\n"
        except OSError:
            continue


@click.command("report", cls=FlagCommand)
@click.argument("file", metavar="[FILE]", default="")
@VERBOSE
@with_flags(RULES, SOURCES)
@OUTPUT
def command(file: str, output: str, **options: Any) -> None:
    """Write an archive for a bug report.

    It contains the version, configuration, objects, plans, kernel state, differences, metrics, the end of the
    log, what `kproxy doctor` finds, and which modes work on this machine: addresses and names of Services,
    but no secrets. They are those of the running proxy, or of --manifests, --kubeconfig, --master or
    --config. `kproxy explain --report` answers from the archive.

    FILE must not exist; - is standard output. By default, the archive is written to standard output if that
    is no terminal, and to a new file else. The list of contents is then printed to standard error.
    """
    is_piped = file in ("-", "/dev/stdout") or not (file or sys.stdout.isatty())
    if is_piped and sys.stdout.isatty():
        raise click.UsageError("the archive is not written to a terminal: name a file or use a pipe")
    where = "standard output" if is_piped else file or new_name()
    try:
        with cli_errors(), sys.stdout.buffer if is_piped else create(where) as archive:
            names = write(archive, contents(given(options)))
    except BrokenPipeError:
        raise
    except OSError as error:
        read_only = "; `kproxy report >FILE` writes no file here" if error.errno == errno.EROFS else ""
        raise click.ClickException(f"{where}: {error.strerror}{read_only}") from error
    text = f"{where}: {', '.join(names)}" if output == "text" else encoded(
        {"file": where, "contents": names}, output)
    click.echo(text, err=is_piped)
