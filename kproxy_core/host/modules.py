"""The modules of the running kernel: which are there, and which could be loaded. Looking loads nothing.

Where to look is what kube-proxy did up to 1.25 (pkg/proxy/ipvs/proxier.go, GetModules), and modprobe(8).
"""

import enum
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from kproxy_core.host import programs
from kproxy_core.host.programs import ProgramFailed


class Presence(enum.Enum):
    """How the kernel has something that may be a module."""

    LOADED = "loaded"
    BUILT_IN = "built in"
    LOADABLE = "loadable"
    ABSENT = "not there"
    UNKNOWN = "not to be seen"
    """From here, as in a container without the node's /lib/modules."""


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel."""
    numbers = platform.release().split(".")
    minor = "".join(c for c in numbers[1] if c.isdigit()) if len(numbers) > 1 else ""
    return int(numbers[0]), int(minor or 0)


class Modules:
    """What this kernel has at the time of asking."""

    def __init__(
        self, options: Mapping[str, str] | None = None, *, root: Path = Path("/"), release: str = ""
    ) -> None:
        """*options*: the kernel's configuration options of modules where they are not ``CONFIG_`` and the
        module's name. *root* and *release* are others in tests."""
        self._options = options or {}
        self._root = root
        self.release = release or platform.release()
        self._directory = root / "lib/modules" / self.release
        self._loaded = self._read_loaded()
        self._built_in = _module_names(self._directory / "modules.builtin")
        self._configuration: str | None = None
        self._files: frozenset[str] | None = None

    def afresh(self) -> "Modules":
        """What there is now."""
        return Modules(self._options, root=self._root, release=self.release)

    @property
    def fixed(self) -> bool:
        """Nothing can be loaded: the kernel is built without modules, or has been told to take no more."""
        if self._loaded is None:
            return True
        try:
            return (self._root / "proc/sys/kernel/modules_disabled").read_text().strip() == "1"
        except OSError:
            return False

    @property
    def directory_missing(self) -> bool:
        """There are modules, and their directory is not to be seen from here."""
        return self._loaded is not None and not self._directory.is_dir()

    def where(self, module: str) -> Presence:
        """How the kernel has *module*."""
        if module in (self._loaded or ()):
            return Presence.LOADED
        if module in self._built_in or f"{self.option(module)}=y\n" in self._config_text():
            return Presence.BUILT_IN
        if (self._root / "sys/module" / module).is_dir():
            return Presence.BUILT_IN if self._loaded is None else Presence.LOADED
        if f"# {self.option(module)} is not set\n" in self._config_text():
            return Presence.ABSENT
        if self._directory.is_dir():
            return Presence.LOADABLE if module in self._module_files() else Presence.ABSENT
        return Presence.LOADABLE if f"{self.option(module)}=m\n" in self._config_text() else Presence.UNKNOWN

    def not_loaded(self, modules: Iterable[str]) -> list[str]:
        """Those of *modules* that the kernel might load when it is asked for what they do."""
        if self.fixed:
            return []
        return [m for m in modules if self.where(m) in (Presence.LOADABLE, Presence.UNKNOWN)]

    def option(self, module: str) -> str:
        """What has to be in the kernel's configuration for it."""
        return self._options.get(module, f"CONFIG_{module.upper()}")

    def remedy(self, module: str) -> str:
        """What an operator can do about a module that is missing."""
        text = f"modprobe {module}, or use a kernel with {self.option(module)}"
        if self.directory_missing:
            text += f"; in a container mount the node's /lib/modules, {self.release} is not there"
        return text

    def _read_loaded(self) -> frozenset[str] | None:
        """None: the kernel is built without modules."""
        try:
            lines = (self._root / "proc/modules").read_text().splitlines()
        except FileNotFoundError:
            return None
        except OSError:
            return frozenset()
        return frozenset(line.split()[0] for line in lines if line.split())

    def _module_files(self) -> frozenset[str]:
        if self._files is None:
            self._files = _module_names(self._directory / "modules.dep")
        return self._files

    def _config_text(self) -> str:
        """The options that the kernel was built with, as far as it tells."""
        if self._configuration is None:
            import gzip  # not for who only asks for a version

            self._configuration = ""
            try:
                path = self._root / f"boot/config-{self.release}"
                self._configuration = path.read_text(errors="replace")
            except OSError:
                try:
                    with gzip.open(self._root / "proc/config.gz", "rt", errors="replace") as file:
                        self._configuration = file.read()
                except OSError:
                    pass
        return self._configuration


def load(modules: Iterable[str]) -> str:
    """Have modprobe load *modules*; what went wrong, or ""."""
    try:
        problems = [done for done in (programs.run("modprobe", module) for module in modules)
                    if done.returncode]  # fmt: skip
    except ProgramFailed as error:
        return str(error)
    return "; ".join(map(programs.failure, problems))


def _module_names(path: Path) -> frozenset[str]:
    """The modules whose files begin the lines of a list such as modules.dep."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    files = (line.partition(":")[0].rpartition("/")[2] for line in lines)
    return frozenset(name.partition(".ko")[0].replace("-", "_") for name in files)
