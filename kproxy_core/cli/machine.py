"""Facts about this machine that concern all modes."""

import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from kproxy_core.host import privileges, sysctl, trial
from kproxy_core.host.errors import HostError
from kproxy_core.host.modules import Modules
from kproxy_core.model.address import Family


def facts(families: Iterable[Family]) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts about this machine, as this process sees it."""
    modules = Modules()
    yield "kernel", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "IP families", ", ".join(family.label for family in families)
    held = privileges.held()
    yield "user id", str(os.geteuid())
    yield "capabilities", ", ".join(name for name in privileges.CAPABILITIES if name in held) or "none"
    yield "network namespaces for trials", _namespaces()
    yield "kernel modules", _modules(modules)
    for name in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/netfilter/nf_conntrack_max"):
        yield f"sysctl {name.replace('/', '.')}", _sysctl(name)
    yield "cgroup", _cgroup()
    yield "BPF", _bpf()


def _namespaces() -> str:
    try:
        problem = trial.ask(lambda namespace: namespace.enter())
    except trial.NoAnswer as error:
        return str(error)
    if problem:
        return problem
    return "can be made" if "CAP_SYS_ADMIN" in privileges.held() else "can be made in a user namespace"


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
