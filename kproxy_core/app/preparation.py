"""Settings of the process and of the node that are made once, before anything is served."""

import ctypes
import errno
import gc
import logging
import resource
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import asdict

from kproxy_core.config.settings import Config
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Scope
from kproxy_core.linux.addresses import read_interface_addresses
from kproxy_core.linux.conntrack_limits import ConntrackLimits, apply_limits
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.links import read_links, shortened, unaddressed_links
from kproxy_core.model.address import Family
from kproxy_core.observe.events import EventRecorder
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

_NODE_CRITICAL_SCORE = -997
"""The oom_score_adj that the kubelet gives to containers of the priority class system-node-critical, which
may not lower it: as good as kube-proxy's -999 (Kubernetes 1.36, pkg/kubelet/qos/policy.go)."""

_M_TRIM_THRESHOLD = -1
"""A parameter of mallopt(3)."""

_TRIM_BYTES = 128 << 10
_TRIM_BYTES_LOADING = 1 << 20
"""While the first lists are decoded: each piece of one is freed before the next arrives, and giving its pages
back to the kernel between two pieces takes longer than reading them."""


def tune_interpreter() -> None:
    """Switch threads faster, and have glibc trim its heap."""
    # A waiting thread asks for the interpreter's lock only after this long. The default of 5 ms exceeds
    # all other latency between a change and its rules. A sync needs the lock after each call of the kernel,
    # while other threads may compute for long: a scrape of 10,000 Services for 0.4 s, 1 MB of YAML for 1 s.
    sys.setswitchinterval(0.0001)
    # By default glibc keeps twice the largest block that was ever freed.
    _set_trim_threshold(_TRIM_BYTES_LOADING)


def settle_memory() -> None:
    """Exclude all objects that exist after the first sync, which mostly live on, from garbage collection.

    They are not searched for cycles before: imports leave 1,500 objects in cycles, and each Service none.
    """
    gc.freeze()
    _set_trim_threshold(_TRIM_BYTES)
    return_freed_memory()
    # Values are freed by their reference counts; cycles come from rare exceptions only.
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


class FreedMemory(SyncObserver):
    """Returns the memory that full syncs have freed, after damage or a change of modes for instance.

    The libraries of a mode free up to 10 MiB in the middle of the heap, which glibc keeps. After the first
    syncs `settle_memory` returns it.
    """

    def sync_succeeded(self, synced: Synced) -> None:
        if synced.scope is Scope.RESYNC and not synced.is_first:
            return_freed_memory()


def return_freed_memory() -> None:
    """Return free pages in the middle of the heap, which glibc keeps otherwise."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _set_trim_threshold(size: int) -> None:
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, size)


def raise_file_limit() -> None:
    """Raise the limit of open files to the most allowed: each health check node port needs one."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except OSError as error:
        log.warning("could not raise the limit of open files", extra={"fields": {"error": str(error)}})


def protect_from_oom_killer(score: int) -> None:
    """Set this process's oom_score_adj to *score*, if that is permitted."""
    setting = Path("/proc/self/oom_score_adj")
    try:
        setting.write_text(str(score), encoding="ascii")
    except OSError as error:
        with suppress(OSError):
            if int(setting.read_text(encoding="ascii")) <= _NODE_CRITICAL_SCORE:
                return
        log.info("could not set oom_score_adj", extra={"fields": {"wanted": score, "error": str(error)}})


def limits(config: Config) -> ConntrackLimits:
    return ConntrackLimits(**asdict(config.conntrack))


def tune_conntrack(wanted: ConntrackLimits, events: EventRecorder) -> bool:
    """Set limits and timeouts of tracked connections. Log those that may not be written.

    Return False if the kernel does not track connections yet; our rules will make it. Raises HostError.
    """
    try:
        applied = apply_limits(wanted)
    except HostError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    if applied.refused:
        log.warning("some conntrack settings could not be applied", extra={
            "fields": {"first": str(applied.refused[0]), "refused": len(applied.refused)}})
    if applied.read_only_sys:
        note = "the conntrack hash table cannot be enlarged, /sys is read-only: lookups may become slow"
        log.warning(note)
        events.report_node("Warning", "readOnlySysFS", note)
    return True


def warn_of_unaddressed(mode: str, families: Iterable[Family], needs: Callable[[Family], bool]) -> None:
    """Log the interfaces of pods whose packets *mode* loses. *needs*: `Backend.needs_interface_addresses`."""
    for family in filter(needs, families):
        try:
            numbered = {each.interface for each in read_interface_addresses() if each.family == family.af}
            without = unaddressed_links(read_links(), numbered)
        except HostError as error:
            log.warning("could not look for interfaces without an address", extra={
                "fields": {"error": str(error)}})
            return
        if without:
            log.warning("pods behind interfaces without an address are not served, set bindAddress", extra={
                "fields": {"mode": mode, "ip_family": family.label, "interfaces": shortened(without)}})


def prepare_others(
    registry: Registry, modes: Iterable[str], settings_of: Callable[[str], BackendSettings]
) -> list[str]:
    """Prepare this machine for *modes*, so that a running proxy can switch to them.

    Return the prepared modes. Failures are logged. Not every installed mode is prepared: the settings of one
    weaken a node that does not run it, as route_localnet does without its guarding rules (CVE-2020-8558).
    """
    prepared = []
    for mode in modes:
        try:
            registry.prepare(mode, settings_of(mode))
            prepared.append(mode)
        except Exception as error:  # noqa: BLE001 - a plugin's, or a setting of a mode that does not serve
            log.warning("could not prepare another mode, switching to it may fail", extra={
                "fields": {"mode": mode, "error": str(error)}})
    return prepared
