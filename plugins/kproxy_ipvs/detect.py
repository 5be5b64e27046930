"""Whether this machine can run the mode. Looks only; nothing is loaded or changed.

Where modules are looked for is what kube-proxy did up to 1.25 (pkg/proxy/ipvs/proxier.go, GetModules).
"""

import gzip
import platform
import re
from collections.abc import Callable
from pathlib import Path

from kproxy_core.backend.api import BackendSettings, Detection, Requirement
from kproxy_core.backend.errors import Unsupported
from kproxy_core.host import programs
from kproxy_core.host.programs import ProgramFailed
from kproxy_ipvs import kernel
from kproxy_ipvs.settings import read_settings

_MODE = "ipvs"
_OLDEST_IPSET = (6, 0)
_VERSION = re.compile(r"v(\d+)\.(\d+)")
_CONNTRACK_IN_ONE = (4, 19)
"""Since when there is one module for both families."""

_MODULE = "module "

_CONFIG = {
    "ip_vs": "CONFIG_IP_VS", "ip_set": "CONFIG_IP_SET", "xt_set": "CONFIG_NETFILTER_XT_SET",
    "nf_conntrack": "CONFIG_NF_CONNTRACK", "nf_conntrack_ipv4": "CONFIG_NF_CONNTRACK_IPV4",
    "dummy": "CONFIG_DUMMY",
}  # fmt: skip


def detect(settings: BackendSettings) -> Detection:
    """Look for modules, then for programs."""
    try:
        scheduler = read_settings(settings).scheduler
    except Unsupported as error:
        return Detection(_MODE, (Requirement("scheduler", False, str(error), "choose another"),))
    conntrack = "nf_conntrack" if kernel.release() >= _CONNTRACK_IN_ONE else "nf_conntrack_ipv4"
    wanted = ("ip_vs", f"ip_vs_{scheduler}", conntrack, "ip_set", "xt_set", "dummy")
    search = ModuleSearch()
    return Detection(_MODE, (*(search.requirement(name) for name in wanted), _ipset(), _iptables()))


def is_module(requirement: Requirement) -> bool:
    """Whether *requirement* is about a module of the kernel."""
    return requirement.what.startswith(_MODULE)


class ModuleSearch:
    """Finds modules of the running kernel. *root* and *loadable* are others in tests."""

    def __init__(
        self, root: Path = Path("/"), release: str = "", loadable: Callable[[str], bool] | None = None
    ) -> None:
        self._root = root
        self._release = release or platform.release()
        self._loadable = loadable or _loadable
        self._loaded = _words(root / "proc/modules")
        self._built_in = _built_in(root / "lib/modules" / self._release / "modules.builtin")
        self._config: str | None = None

    def where(self, module: str) -> str:
        """How the kernel has *module*: loaded, built in or loadable; "" if it does not."""
        if module in self._loaded or (self._root / "sys/module" / module).is_dir():
            return "loaded"
        if module in self._built_in:
            return "built in"
        if f"{_config_name(module)}=y\n" in self._configuration():
            return "built in"
        return "loadable" if self._loadable(module) else ""

    def requirement(self, module: str) -> Requirement:
        """*module* as found."""
        found = self.where(module)
        if found:
            return Requirement(f"{_MODULE}{module}", True, f"{module} {found}")
        option = _config_name(module)
        remedy = f"modprobe {module}, or use a kernel with {option}"
        if not (self._root / "lib/modules" / self._release).is_dir():
            remedy += f"; in a container mount the node's /lib/modules, {self._release} is not there"
        return Requirement(f"{_MODULE}{module}", False, f"Linux {self._release} does not have it", remedy)

    def _configuration(self) -> str:
        """The options that the kernel was built with, as far as it tells."""
        if self._config is None:
            self._config = ""
            try:
                self._config = (self._root / f"boot/config-{self._release}").read_text(errors="replace")
            except OSError:
                try:
                    with gzip.open(self._root / "proc/config.gz", "rt", errors="replace") as file:
                        self._config = file.read()
                except OSError:
                    pass
        return self._config


def _config_name(module: str) -> str:
    return _CONFIG.get(module, f"CONFIG_{module.upper()}")


def _words(path: Path) -> frozenset[str]:
    """The first word of each line."""
    try:
        return frozenset(line.split()[0] for line in path.read_text().splitlines() if line.split())
    except OSError:
        return frozenset()


def _built_in(path: Path) -> frozenset[str]:
    try:
        return frozenset(Path(line).name.removesuffix(".ko") for line in path.read_text().splitlines())
    except OSError:
        return frozenset()


def _loadable(module: str) -> bool:
    """Whether modprobe would know what to load; it does not."""
    try:
        return programs.run("modprobe", "-qn", module).returncode == 0
    except ProgramFailed:
        return False


def _ipset() -> Requirement:
    what = "ipset"
    if not programs.find("ipset"):
        return Requirement(what, False, "not installed", "install ipset 6.0 or newer")
    try:
        said = programs.run("ipset", "--version").stdout
    except ProgramFailed as error:
        return Requirement(what, False, str(error), "install ipset 6.0 or newer")
    found = _VERSION.search(said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_IPSET:
        return Requirement(what, False, said.strip() or "says no version", "install ipset 6.0 or newer")
    return Requirement(what, True, f"ipset {found[1]}.{found[2]}")


def _iptables() -> Requirement:
    missing = [n for n in ("iptables-save", "iptables-restore", "ip6tables-save", "ip6tables-restore")
               if not programs.find(n)]  # fmt: skip
    if missing:
        return Requirement("iptables", False, f"no {', '.join(missing)}", "install iptables 1.8 or newer")
    return Requirement("iptables", True, "iptables installed")
