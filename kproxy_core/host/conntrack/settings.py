"""The kernel's limits and timeouts for tracked connections.

The rules are kube-proxy 1.36's, cmd/kube-proxy/app/conntrack.go, with one difference: what this process
may not write keeps nobody from being served.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kproxy_core.host import sysctl
from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import HostError

_MOST_FOR_ALL_CORES = 1 << 20
_HASH_SIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")
_MAX = "net/netfilter/nf_conntrack_max"
_NOT_OURS_TO_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)

READ_ONLY_SYS = "readOnlySysFS"
"""The reason of the event about a table that could not be enlarged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConntrackLimits:
    """What the operator wants. Timeouts in seconds; 0 leaves the kernel's value."""

    max_per_core: int = 32768
    """0: leave the limit."""
    min: int = 131072
    tcp_established_timeout: float = 86400
    tcp_close_wait_timeout: float = 3600
    tcp_be_liberal: bool = False
    udp_timeout: float = 0
    udp_stream_timeout: float = 0

    def most(self, cores: int) -> int:
        """How many connections to track; 0: leave that to the kernel."""
        if not self.max_per_core:
            return 0
        scaled = self.max_per_core * cores
        return _MOST_FOR_ALL_CORES if scaled > _MOST_FOR_ALL_CORES else max(scaled, self.min)

    def sysctls(self) -> list[tuple[str, int]]:
        """Names and values of the settings beside the limit."""
        wanted = [("nf_conntrack_tcp_be_liberal", int(self.tcp_be_liberal))]  # never taken back
        wanted += [
            ("nf_conntrack_tcp_timeout_established", int(self.tcp_established_timeout)),
            ("nf_conntrack_tcp_timeout_close_wait", int(self.tcp_close_wait_timeout)),
            ("nf_conntrack_udp_timeout", int(self.udp_timeout)),
            ("nf_conntrack_udp_timeout_stream", int(self.udp_stream_timeout)),
        ]
        return [(f"net/netfilter/{name}", value) for name, value in wanted if value > 0]


class Applied(NamedTuple):
    """What became of the settings."""

    refused: Sequence[HostError]
    """What this process may not write, although it differs."""
    read_only_sys: bool = False
    """The hash table is too small for the limit and can't be enlarged: lookups get slower."""


def apply(limits: ConntrackLimits, cores: int | None = None, hash_size: Path = _HASH_SIZE) -> Applied:
    """Set what differs, in the calling thread's network namespace.

    *cores*: those of this machine. Raises HostError for what goes wrong otherwise, with errno ENOENT
    while the kernel does not track connections.
    """
    try:
        sysctl.read(_MAX)
    except HostError:
        _load_tracking()
    refused: list[HostError] = []
    most = limits.most(cores or os.cpu_count() or 1)
    limited = most > 0 and _ensure(_MAX, most, refused)
    read_only_sys = limited and not _enlarge(hash_size, most // 4)
    for name, value in limits.sysctls():
        _ensure(name, value, refused)
    return Applied(tuple(refused), read_only_sys)


def _load_tracking() -> None:
    """Have the kernel load its module for connection tracking, which it does upon any request."""
    with contextlib.suppress(OSError), ctnetlink.open_socket() as sock:
        sock.request(ctnetlink.GET_STATS, 0, bytes(4))


def _ensure(name: str, value: int, refused: list[HostError]) -> bool:
    try:
        sysctl.ensure(name, value)
    except HostError as error:
        if error.errno not in _NOT_OURS_TO_WRITE:
            raise
        refused.append(error)
        return False
    return True


def _enlarge(hash_size: Path, wanted: int) -> bool:
    """Give the table at least *wanted* buckets; False if it stays too small."""
    try:
        if int(hash_size.read_text(encoding="ascii")) >= wanted:
            return True
        hash_size.write_text(str(wanted), encoding="ascii")
    except OSError as error:
        if error.errno in _NOT_OURS_TO_WRITE:
            return False
        raise HostError(f"can't set the size of the conntrack table to {wanted}", error) from error
    return True
