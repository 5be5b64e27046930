"""Requirements of the programs, each tried on its own, and deviations of the mode."""

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kproxy_core.contract import (
    BackendError,
    BackendSettings,
    Caveat,
    Detection,
    Family,
    HostError,
    Protocol,
    Requirement,
    Trial,
    Update,
    format_address,
)
from kproxy_core.contract.caveats import of_loopback, sorted_plans
from kproxy_core.linux import process
from kproxy_core.linux.modules import kernel_version
from kproxy_core.linux.sockets import udp_destruction_problem
from kproxy_ebpf import names
from kproxy_ebpf.kernel import bpf, mounts
from kproxy_ebpf.kernel.maps import namespace_cookie
from kproxy_ebpf.kernel.programs import Compilation, bcc_remedy, compiler
from kproxy_ebpf.settings import Settings, read_settings
from kproxy_ebpf.wanted import only_node_clients, wanted

_PERMISSION = "grant CAP_BPF and CAP_NET_ADMIN, and a seccomp profile that allows bpf(2)"
_ARRAY = bpf.MapDefinition(type=2, key=4, value=4, entries=1, flags=0)
_SK_STORAGE = bpf.MapDefinition(type=bpf.SK_STORAGE, key=4, value=8, entries=0, flags=1)
_LRU = bpf.MapDefinition(type=9, key=8, value=8, entries=64, flags=0)
_CGROUP = "mount the host's cgroup2 tree at /sys/fs/cgroup, or set kproxy.backendOptions.ebpf.cgroup"
_FOREIGN = "remove the exclusive program of the cgroup or an ancestor, or name another cgroup"
_ACCEPT = struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)
"""``r0 = 1; exit``"""


def detect(settings: BackendSettings, trial: Trial | None) -> Detection:
    """Try bpf(2), maps, cgroup, BPF file system and compiler; attach programs only in a *trial*."""
    options = read_settings(settings)
    requirements = [*_quick(options)]
    if trial is not None:
        requirements.append(_attach(options))
    return Detection(tuple(requirements))


def lacking(options: Settings) -> list[str]:
    """Return the missing requirements, as far as they can be checked in milliseconds."""
    return [f"{r.what}: {r.found}. {r.remedy}".rstrip() for r in _quick(options) if not r.met]


def refusal() -> str:
    """Return why this process may not use bpf(2); "" if it may."""
    found = _bpf()
    return "" if found.met else found.found


def _bpf() -> Requirement:
    return _tried("bpf(2)", lambda: os.close(bpf.create_map("kproxy_probe", _ARRAY)), "works")


def _quick(options: Settings) -> Iterator[Requirement]:
    yield _bpf()
    version = ".".join(map(str, kernel_version()))
    yield _tried("BPF socket storage and LRU maps", _make_maps, f"work (Linux {version})",
                 "use Linux 5.8 or newer")  # fmt: skip
    yield _tried("BPF programs for cgroups", lambda: os.close(_load("connect4")), "load")
    yield _tried("cookie of the network namespace", namespace_cookie, "known", "use Linux 5.14 or newer")
    yield _tried("cgroup", lambda: os.close(mounts.open_cgroup(options.cgroup)),
                 options.cgroup or "root of the cgroup2 tree", _CGROUP)  # fmt: skip
    yield _pin_directory(options.pin_directory)
    yield _compiler()
    if options.connected_udp:
        problem = udp_destruction_problem()
        found = f"{problem}: connected UDP sockets are left to the rules" if problem else "works"
        yield Requirement("destruction of UDP sockets", True, found)


def _pin_directory(directory: str) -> Requirement:
    what = "BPF file system"
    if mounts.is_bpf_file_system(directory):
        return Requirement(what, True, f"holds {directory}")
    parent = Path(directory).parent
    if parent.is_dir() and "CAP_SYS_ADMIN" in process.held():
        return Requirement(what, True, f"can be mounted at {parent}", guessed=True)
    return Requirement(what, False, f"{parent} is not one", f"mount -t bpf bpf {parent}")


def _compiler() -> Requirement:
    what = "compiled BPF programs"
    try:
        compilation = Compilation(start=False)
        if compilation.is_done:
            return Requirement(what, True, "built with kproxy" if compilation.are_shipped else "cached")
        if compiler() is not None:
            return Requirement(what, True, "bcc compiles them")
    except (HostError, OSError) as error:
        return Requirement(what, False, str(error), bcc_remedy())
    return Requirement(what, False, "bcc is not installed", bcc_remedy())


def _attach(options: Settings) -> Requirement:
    """Attach a program of each kind to a new child of the cgroup, and remove both."""
    what = "programs at a cgroup"
    child = f"kproxy-probe-{os.getpid()}"
    try:
        parent = mounts.open_cgroup(options.cgroup)
    except (HostError, OSError) as error:
        return Requirement(what, False, str(error), "see above")
    try:
        os.mkdir(child, dir_fd=parent)
        try:
            problem = _attach_all(os.open(child, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent))
        finally:
            os.rmdir(child, dir_fd=parent)
    except OSError as error:
        return Requirement(what, True, f"not tried: {error}", guessed=True)
    finally:
        os.close(parent)
    return Requirement(what, not problem, problem or "all attach", problem and _FOREIGN)


def _attach_all(cgroup: int) -> str:
    """Return why a program cannot be attached to the new *cgroup*, which is closed; "" if all can."""
    try:
        for name in names.KINDS:
            program, attach_type = _load(name), names.KINDS[name][1]
            try:
                os.close(bpf.create_link(program, cgroup, attach_type))
            except PermissionError:
                foreign = ", ".join(map(_name_of, bpf.attached(cgroup, attach_type)))
                return f"{name}: the cgroup or an ancestor has an exclusive program: {foreign}"
            finally:
                os.close(program)
    except OSError as error:
        return str(error)
    finally:
        os.close(cgroup)
    return ""


def _load(name: str) -> int:
    return bpf.load_program(*names.KINDS[name], "kproxy_probe", _ACCEPT)


def _name_of(program: int) -> str:
    """Return the name and id of a program; the name needs CAP_SYS_ADMIN."""
    with suppress(OSError):
        return f"{bpf.program_name(program)} (id {program})"
    return f"id {program}"


def _make_maps() -> None:
    for definition in (_SK_STORAGE, _LRU):
        os.close(bpf.create_map("kproxy_probe", definition))


def _tried(what: str, act: Callable[[], object], works: str, remedy: str = _PERMISSION) -> Requirement:
    try:
        act()
    except (OSError, BackendError, HostError) as error:
        is_refusal = isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES)
        found = getattr(error, "strerror", None) or str(error)
        return Requirement(what, False, found, _PERMISSION if is_refusal else remedy)
    return Requirement(what, True, works)


# Deviations. Pure.

def caveats(update: Update, settings: Settings) -> Iterator[Caveat]:
    """Yield the deviations of connect-time translation."""
    plans = [plan for plan in sorted_plans(update) if any(True for _ in wanted(plan))]
    if not plans:
        return
    if only_node_clients(settings.clients, update.node):
        yield Caveat("sockets of pods are left to the rules", lost=False)
    else:
        if settings.clients == "all":
            yield Caveat("pods reach external frontends with their own address as source", lost=False)
        if not settings.cgroup:
            yield Caveat(
                "containers of this machine that are not of this cluster are translated too", lost=False
            )
    for plan in plans:
        if plan.resets_removed and plan.key.protocol is Protocol.TCP:
            yield Caveat("connections of pods are left to the rules, which reset those to removed endpoints",
                         plan.key, lost=False)  # fmt: skip
            if not settings.stores_peers:
                yield Caveat(
                    "connections of the node itself to removed endpoints are not reset without getpeername",
                    plan.key)
        if plan.affinity_seconds:
            yield Caveat("session affinity tells clients apart by network namespace, not by address",
                         plan.key, lost=False)  # fmt: skip
        if plan.node_port and update.node.node_ports_on_loopback:
            where = format_address(update.node.family.loopback)
            of_rules = of_loopback(plan, is_relayed=update.node.relays_node_ports)
            serves_all = plan.key.protocol is Protocol.TCP or settings.connected_udp
            yield Caveat(
                f"node port {plan.node_port} is served on {where} to the node itself", plan.key, lost=False,
                only_here=update.node.family is Family.IPV6 and not update.node.relays_node_ports,
                replaces=of_rules.what if of_rules is not None and serves_all else "")  # fmt: skip
