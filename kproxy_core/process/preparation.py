"""What is set once for the process and the node before anything is served."""

import errno
import gc
import logging
import resource
import sys
from pathlib import Path

from kproxy_core.config.settings import Config
from kproxy_core.host.conntrack.settings import READ_ONLY_SYS, ConntrackLimits, apply
from kproxy_core.host.errors import HostError
from kproxy_core.observe.events.recorder import EventRecorder

log = logging.getLogger("kproxy.run")


def tune_interpreter() -> None:
    """Let a change get from its watch to the loop at once, and memory alone until the first sync is done."""
    # A thread that wants to run asks for the interpreter's lock only after this long. The default is
    # 5 ms, longer than everything else between a change and its rules together.
    sys.setswitchinterval(0.0005)
    # What comes in at the start stays. Looking through it again and again for cycles would find none
    # and takes longer than the first sync itself.
    gc.disable()


def settle_memory() -> None:
    """What lives after the first sync mostly lives on: take it out of the collector's sight."""
    gc.collect()
    gc.freeze()
    # Values are freed by their reference counts; cycles come from rare exceptions only.
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def raise_file_limit() -> None:
    """As many open files as this process may have: each health check node port is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def protect_from_oom_killer(score: int) -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score), encoding="ascii")
    except OSError as error:
        log.info("oom_score_adj stays as it is", extra={"fields": {"wanted": score, "error": str(error)}})


def limits(config: Config) -> ConntrackLimits:
    """What the configuration says about tracked connections."""
    said = config.conntrack
    return ConntrackLimits(
        max_per_core=said.max_per_core,
        min=said.min,
        tcp_established_timeout=said.tcp_established_timeout,
        tcp_close_wait_timeout=said.tcp_close_wait_timeout,
        tcp_be_liberal=said.tcp_be_liberal,
        udp_timeout=said.udp_timeout,
        udp_stream_timeout=said.udp_stream_timeout,
    )


def tune_conntrack(wanted: ConntrackLimits, events: EventRecorder) -> bool:
    """Set limits and timeouts of tracked connections; what may not be written is logged.

    False while the kernel does not track connections at all: rules of ours will change that.
    Raises HostError.
    """
    try:
        applied = apply(wanted)
    except HostError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    if applied.refused:
        log.warning("not everything about tracked connections could be set", extra={
            "fields": {"first": str(applied.refused[0]), "refused": len(applied.refused)}})
    if applied.read_only_sys:
        note = "the table of tracked connections can't be enlarged, /sys is read-only: lookups may get slow"
        log.warning(note)
        events.report_node("Warning", READ_ONLY_SYS, note)
    return True
