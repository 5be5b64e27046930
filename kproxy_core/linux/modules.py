"""The modules of the running kernel: loaded, built in or loadable. Only `Modules.load` loads any.

The places to look are those of kube-proxy up to 1.25 (pkg/proxy/ipvs/proxier.go, GetModules) and modprobe(8).
"""

import enum
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from kproxy_core.linux import programs
from kproxy_core.linux.programs import ProgramFailed


class Presence(enum.Enum):
    LOADED = "loaded"
    BUILT_IN = "built in"
    LOADABLE = "loadable"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """For example in a container without the node's /lib/modules."""


def kernel_version() -> tuple[int, int]:
    numbers = platform.release().split(".")
    minor = "".join(c for c in numbers[1] if c.isdigit()) if len(numbers) > 1 else ""
    return int(numbers[0]), int(minor or 0)


class Modules:
    """The modules of this kernel when the object was made, or last loaded some."""

    def __init__(
        self, options: Mapping[str, str] | None = None, *, root: Path = Path("/"), release: str = ""
    ) -> None:
        """*options* are the kernel configuration options of modules whose option is not ``CONFIG_`` and the
        module's name. Tests set *root* and *release*.
        """
        self._options = options or {}
        self._root = root
        self.release = release or platform.release()
        self._directory = root / "lib/modules" / self.release
        self._loaded = self._read_loaded()
        self._built_in = _module_names(self._directory / "modules.builtin")

    @property
    def fixed(self) -> bool:
        """True if no module can be loaded: built without module support, or loading is disabled."""
        if self._loaded is None:
            return True
        try:
            return (self._root / "proc/sys/kernel/modules_disabled").read_text().strip() == "1"
        except OSError:
            return False

    @property
    def directory_missing(self) -> bool:
        """True if the kernel has modules, but their directory is not visible to this process."""
        return self._loaded is not None and not self._directory.is_dir()

    def presence(self, module: str) -> Presence:
        if module in (self._loaded or ()):
            return Presence.LOADED
        if module in self._built_in or f"{self.option(module)}=y\n" in self._config_text:
            return Presence.BUILT_IN
        if (self._root / "sys/module" / module).is_dir():
            return Presence.BUILT_IN if self._loaded is None else Presence.LOADED
        if f"# {self.option(module)} is not set\n" in self._config_text:
            return Presence.ABSENT
        if self._directory.is_dir():
            return Presence.LOADABLE if module in self._module_files else Presence.ABSENT
        return Presence.LOADABLE if f"{self.option(module)}=m\n" in self._config_text else Presence.UNKNOWN

    def not_loaded(self, modules: Iterable[str]) -> list[str]:
        """Return those of *modules* that the kernel might load when their feature is used."""
        if self.fixed:
            return []
        return [m for m in modules if self.presence(m) in (Presence.LOADABLE, Presence.UNKNOWN)]

    def load(self, modules: Iterable[str]) -> str:
        """Load *modules* with modprobe. Return the problems, or ""."""
        try:
            done = [programs.run("modprobe", module) for module in modules]
        except ProgramFailed as error:
            return str(error)
        finally:
            self._loaded = self._read_loaded()
        return "; ".join(programs.failure(each) for each in done if each.returncode)

    def option(self, module: str) -> str:
        return self._options.get(module, f"CONFIG_{module.upper()}")

    def remedy(self, module: str) -> str:
        text = f"modprobe {module}, or use a kernel with {self.option(module)}"
        if self.directory_missing:
            text += f"; in a container, mount the node's /lib/modules, it lacks {self.release}"
        return text

    def _read_loaded(self) -> frozenset[str] | None:
        """Return the loaded modules; None if the kernel is built without module support."""
        try:
            lines = (self._root / "proc/modules").read_text().splitlines()
        except FileNotFoundError:
            return None
        except OSError:
            return frozenset()
        return frozenset(line.split()[0] for line in lines if line.split())

    @cached_property
    def _module_files(self) -> frozenset[str]:
        return _module_names(self._directory / "modules.dep")

    @cached_property
    def _config_text(self) -> str:
        """The options that the kernel was built with; "" if they cannot be read."""
        import gzip  # only when needed, for a fast start

        with suppress(OSError):
            return (self._root / f"boot/config-{self.release}").read_text(errors="replace")
        with suppress(OSError), gzip.open(self._root / "proc/config.gz", "rt", errors="replace") as file:
            return file.read()
        return ""


def _module_names(path: Path) -> frozenset[str]:
    """Return the modules listed in a file such as modules.dep, whose lines begin with a module's path."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    files = (line.partition(":")[0].rpartition("/")[2] for line in lines)
    return frozenset(name.partition(".ko")[0].replace("-", "_") for name in files)
