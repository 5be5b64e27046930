"""``kproxy modes``: the installed backends, and which of them work on this machine."""

import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from kproxy_core.cli.options import OUTPUT, FlagCommand, complete_mode, given, with_flags
from kproxy_core.cli.run import cli_errors, warn_of_broken
from kproxy_core.cli.terminal import bad, encoded, good, hint, is_terminal, show, strong
from kproxy_core.config.flags import RULES
from kproxy_core.config.settings import Config
from kproxy_core.contract.errors import InvalidOption, Unsupported
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import Description, Detection, Requirement, Trial
from kproxy_core.linux import process, sysctl, trial
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.modules import Modules
from kproxy_core.model.address import Family
from kproxy_core.modes.choice import candidates, primary
from kproxy_core.modes.settings import Configuration, served_families, serving_settings


def facts(families: Iterable[Family]) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts about this machine, as this process sees it."""
    modules = Modules()
    yield "kernel", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "IP families", ", ".join(family.label for family in families)
    held = process.held()
    yield "user id", str(os.geteuid())
    yield "capabilities", ", ".join(name for name in process.CAPABILITIES if name in held) or "none"
    yield "network namespaces for trials", _namespaces()
    yield "kernel modules", _modules(modules)
    for name in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/netfilter/nf_conntrack_max"):
        yield f"sysctl {name.replace('/', '.')}", _sysctl(name)
    yield "cgroup", _cgroup()
    yield "BPF", _bpf()


def _namespaces() -> str:
    try:
        problem = trial.run_in_child(lambda namespace: namespace.enter())
    except trial.TrialFailed as error:
        return str(error)
    if problem:
        return problem
    return "can be made" if "CAP_SYS_ADMIN" in process.held() else "can be made in a user namespace"


def _modules(modules: Modules) -> str:
    if modules.fixed:
        return "none can be loaded; only built-in and loaded ones exist"
    if modules.directory_missing:
        return f"/lib/modules/{modules.release} does not exist: loadable modules are unknown"
    return f"in /lib/modules/{modules.release}"


def _sysctl(name: str) -> str:
    try:
        return sysctl.read(name)
    except HostError as error:
        return str(error)


def _cgroup() -> str:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return "version 2"
    return "version 2 beside version 1" if (root / "unified").is_dir() else "no version 2 at /sys/fs/cgroup"


def _bpf() -> str:
    parts = ["types of the kernel (BTF)" if Path("/sys/kernel/btf/vmlinux").exists() else "no BTF"]
    parts.append("a bpf file system" if _has_bpf_mount() else "no bpf file system at /sys/fs/bpf")
    if _sysctl("net/core/bpf_jit_enable") in ("1", "2"):
        parts.append("JIT")
    return ", ".join(parts)


def _has_bpf_mount() -> bool:
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[1:3] == ["/sys/fs/bpf", "bpf"] for line in mounts)


_OPTIONS = "options"
_GATE = "a feature gate"


@dataclass(frozen=True, slots=True)
class DescribedMode:
    """One mode; `detection` is None if it was not probed."""

    description: Description
    detection: Detection | None = None

    def as_document(self) -> dict[str, Any]:
        major, minor = self.description.contract
        document: dict[str, Any] = {
            "mode": self.description.mode,
            "summary": self.description.summary,
            "preference": self.description.preference,
            "fallback": self.description.fallback,
            "contract": f"{major}.{minor}",
        }
        if self.detection is not None:
            document["usable"] = self.detection.usable
            document["requirements"] = [
                structs.asdict(requirement) for requirement in self.detection.requirements]
        return document

    def summary(self) -> str:
        """Return its name and what it is, or if it was probed, whether it is usable and why not."""
        name = f"{self.description.mode:<12}"
        if self.detection is None:
            return f"{name} {self.description.summary}"
        if missing := self._missing():
            return f"{name} {bad('not usable')}  {missing.what}: {missing.found}"
        guessed = any(requirement.guessed for requirement in self.detection.requirements)
        return f"{name} {good('usable')}{', as far as can be told without trying' if guessed else ''}"

    def remedy(self) -> str:
        """Return the remedy of the first requirement that is missing; "" if none is, or it has none."""
        missing = self._missing()
        return missing.remedy if missing else ""

    def _missing(self) -> Requirement | None:
        found = self.detection.requirements if self.detection is not None else ()
        return next((requirement for requirement in found if not requirement.met), None)

    def details(self) -> Iterator[str]:
        """Yield lines about every requirement."""
        yield strong(self.description.mode)
        for requirement in self.detection.requirements if self.detection is not None else ():
            yield from _lines(requirement)


@dataclass(frozen=True, slots=True)
class Report:
    machine: Mapping[str, str]
    """Facts about this machine; empty unless the modes were probed."""
    modes: tuple[DescribedMode, ...]
    serving: str = ""
    """The mode that a proxy would choose on this machine, if probed; "": none."""

    def works(self, mode: str) -> bool:
        """Return whether *mode* (or "": any mode) is usable. Modes that were not probed count as usable."""
        return any(
            described.detection is None or described.detection.usable
            for described in self.modes
            if mode in ("", described.description.mode)
        )

    def as_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"modes": [mode.as_document() for mode in self.modes]}
        if self.machine:
            document["machine"] = dict(self.machine)
            document["serving"] = self.serving
        return document

    def text(self, *, verbose: bool) -> str:
        """Return the answer in the first line, then a line for each mode; if *verbose*, all findings, too.

        If no mode serves, the lines have what helps.
        """
        lines = []
        if self.machine:
            would = "a proxy started like this would"
            lines.append(f"{would} serve in mode {good(self.serving)}" if self.serving
                         else bad(f"{would} not serve: no mode that it may use works here"))
        for mode in self.modes:
            lines.append(mode.summary())
            if self.machine and not self.serving and (remedy := mode.remedy()):
                lines.append(f"{'':<12} {hint(remedy)}")
        if self.machine and verbose:
            lines += ["", strong("machine"), *(f"  {what}: {found}" for what, found in self.machine.items())]
            for mode in self.modes:
                lines += ["", *mode.details()]
        return "\n".join(lines)


def formatted(report: Report, output: str, *, verbose: bool = False) -> str:
    """Return *report* as *output*: json, yaml, or text, which has every finding only if *verbose*."""
    return report.text(verbose=verbose) if output == "text" else encoded(report.as_document(), output)


def describe(registry: Registry, mode: str) -> Report:
    """Describe every mode that can be loaded, the preferred one first, or only *mode*.

    Raises UnknownMode or PluginRefused.
    """
    return Report({}, tuple(map(DescribedMode, _descriptions(registry, mode))))


def _descriptions(registry: Registry, mode: str) -> list[Description]:
    return [registry.load(mode)] if mode else registry.load_all()


def find_out(
    registry: Registry, mode: str, configuration: Configuration, *, load_modules: bool,
    report_progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Describe modes as `describe` does, and probe them. Changes nothing; *load_modules* may load modules.

    Calls *report_progress* with each step, and at the end with "".
    Raises UnknownMode, PluginRefused or ConfigError.
    """
    families = served_families()
    known = _descriptions(registry, mode)
    detections = []
    for each in known:
        report_progress(f"trying mode {each.mode}")
        detections.append(_look(registry, each.mode, configuration, families, load_modules))
    report_progress("")
    works = [found.mode for found in detections if found.usable]
    # A proxy does not start if the mode that it chooses has invalid options.
    ends = [found.mode for found in detections if any(r.what == _OPTIONS for r in found.requirements)]
    config = configuration.of(mode or configuration.mode)
    fall_back = not mode and config.kproxy.mode_fallback == "auto"
    asked = candidates(registry, mode or config.mode, fall_back=fall_back)
    first = next((candidate for candidate in asked if candidate in (*works, *ends)), "")
    described = tuple(map(DescribedMode, known, detections))
    return Report(dict(facts(families)), described, first if first in works else "")


def _progress(text: str) -> None:
    """Replace the last line of a terminal by *text*. Elsewhere, print nothing."""
    if is_terminal() and sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _look(
    registry: Registry, mode: str, configuration: Configuration, families: tuple[Family, ...],
    load_modules: bool,
) -> Detection:
    """Probe *mode* for all *families*, and if that fails for the primary one, which is enough to serve."""
    config = configuration.of(mode)
    found = _detection(registry, config, families, load_modules)
    others = [family.label for family in families if family is not primary(config)]
    if found.usable or len(others) != len(families) - 1 or not others:
        return found
    alone = _detection(registry, config, (primary(config),), load_modules)
    if not alone.usable:
        return found
    unserved = Requirement(" and ".join(others), True, f"not served: {found.because}")
    return Detection((*alone.requirements, unserved), mode)


def _detection(
    registry: Registry, config: Config, families: tuple[Family, ...], load_modules: bool
) -> Detection:
    """Probe in a child process, which may enter a namespace or crash."""

    def detect(namespace: Trial) -> Detection:
        try:
            settings = serving_settings(config, registry, families)
            return registry.detect(config.mode, settings, namespace, load_modules=load_modules)
        except InvalidOption as error:
            return Detection((Requirement(_OPTIONS, False, str(error)),), config.mode)
        except Unsupported as error:
            return Detection((Requirement(_GATE, False, str(error)),), config.mode)

    try:
        return trial.run_in_child(detect)
    except trial.TrialFailed as error:
        return Detection((Requirement("an answer from the plugin", False, str(error)),), config.mode)


def _lines(requirement: Requirement) -> Iterator[str]:
    styled = bad if not requirement.met else hint if requirement.guessed else str
    verdict = ("ok" if requirement.met else "missing") + ("?" if requirement.guessed else "")
    yield f"  {styled(verdict.ljust(8))} {requirement.what}: {requirement.found}"
    if requirement.remedy:
        yield textwrap.indent(hint(requirement.remedy), " " * 11)


@click.command("modes", cls=FlagCommand)
@click.argument("only", metavar="[MODE]", default="", shell_complete=complete_mode)
@with_flags(RULES)
@click.option("--probe", is_flag=True, help="Find out which modes work on this machine, and what is missing.")
@click.option("--load-modules", is_flag=True, help="With --probe: load the kernel modules that a mode needs.")
@click.option("-v", "--verbose", is_flag=True, help="With --probe: show every requirement, and the machine.")
@OUTPUT
def command(
    only: str, probe: bool, load_modules: bool, verbose: bool, output: str, **options: Any
) -> int:
    """List the installed modes, and find out which work here.

    The preferred mode is the first; with MODE, only that one is listed. Exit status of --probe: 0 if MODE, or
    without it any mode, works on this machine, else 1.
    """
    if load_modules and not probe:
        raise click.UsageError("--load-modules requires --probe")
    flags = given(options)
    with cli_errors():
        configuration = Configuration.read(flags)
        registry = Registry(plugins=configuration.of("").kproxy.plugins)
        mode = only or flags.get("mode", "")
        if configured := mode or configuration.mode:
            registry.check_mode(configured)
        if probe:
            report = find_out(registry, mode, configuration, load_modules=load_modules,
                              report_progress=_progress)
        else:
            report = describe(registry, mode)
    show(formatted(report, output, verbose=verbose))
    warn_of_broken(registry)
    return 0 if report.works(configured) else 1
