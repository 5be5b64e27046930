"""Limits and timeouts of connection tracking.

As in kube-proxy 1.36 (cmd/kube-proxy/app/conntrack.go), except that a setting which this process is not
permitted to write does not prevent serving.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from kproxy_core.linux import sysctl
from kproxy_core.linux.conntrack import load_module
from kproxy_core.linux.errors import HostError

_MAX_SCALED = 1 << 20
_HASH_SIZE = Path("/sys/module/nf_conntrack/parameters/hashsize")
_MAX = "net/netfilter/nf_conntrack_max"
_NOT_PERMITTED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)


class ConntrackLimits(Struct, frozen=True, kw_only=True):
    """The configured limits. Timeouts are in seconds; 0 keeps the kernel's value."""

    max_per_core: int = 32768
    """Connections per core; 0 keeps the kernel's limit."""
    min: int = 131072
    tcp_established_timeout: float = 86400
    tcp_close_wait_timeout: float = 3600
    tcp_be_liberal: bool = False
    udp_timeout: float = 0
    udp_stream_timeout: float = 0

    def max_connections(self, cores: int) -> int:
        """Return the limit of tracked connections; 0 keeps the kernel's."""
        if not self.max_per_core:
            return 0
        scaled = self.max_per_core * cores
        return _MAX_SCALED if scaled > _MAX_SCALED else max(scaled, self.min)

    def sysctls(self) -> list[tuple[str, int]]:
        """Return names and values of the settings other than the limit."""
        wanted = [
            ("nf_conntrack_tcp_be_liberal", int(self.tcp_be_liberal)),  # never reset to 0
            ("nf_conntrack_tcp_timeout_established", int(self.tcp_established_timeout)),
            ("nf_conntrack_tcp_timeout_close_wait", int(self.tcp_close_wait_timeout)),
            ("nf_conntrack_udp_timeout", int(self.udp_timeout)),
            ("nf_conntrack_udp_timeout_stream", int(self.udp_stream_timeout)),
        ]
        return [(f"net/netfilter/{name}", value) for name, value in wanted if value > 0]


class AppliedLimits(NamedTuple):
    refused: Sequence[HostError]
    """Settings that differ and that this process is not permitted to write."""
    read_only_sys: bool = False
    """The hash table is too small for the limit and cannot be enlarged, which slows lookups."""


def apply_limits(
    limits: ConntrackLimits, cores: int | None = None, hash_size: Path = _HASH_SIZE
) -> AppliedLimits:
    """Write the settings that differ, in the calling thread's network namespace.

    A higher limit of connections is kept, as in kube-proxy 1.38 (kubernetes pull request 142035): a container
    may not be permitted to lower what the node's owner has raised. *cores* defaults to this machine's. Raises
    HostError for errors other than a lack of permission, with errno ENOENT while the kernel does not track
    connections.
    """
    try:
        sysctl.read(_MAX)
    except HostError:  # The kernel loads its module for connection tracking at any request.
        with contextlib.suppress(OSError):
            load_module()
    refused: list[HostError] = []
    limit = limits.max_connections(cores or os.cpu_count() or 1)
    limited = limit > 0 and _ensure(_MAX, limit, refused, sysctl.ensure_at_least)
    read_only_sys = limited and not _enlarge(hash_size, limit // 4)
    for name, value in limits.sysctls():
        _ensure(name, value, refused)
    return AppliedLimits(tuple(refused), read_only_sys)


def _ensure(
    name: str, value: int, refused: list[HostError], ensure: Callable[[str, int], bool] = sysctl.ensure
) -> bool:
    try:
        ensure(name, value)
    except HostError as error:
        if error.errno not in _NOT_PERMITTED:
            raise
        refused.append(error)
        return False
    return True


def _enlarge(hash_size: Path, wanted: int) -> bool:
    """Give the hash table at least *wanted* buckets. Return False if it remains smaller."""
    try:
        if int(hash_size.read_text(encoding="ascii")) >= wanted:
            return True
        hash_size.write_text(str(wanted), encoding="ascii")
    except OSError as error:
        if error.errno in _NOT_PERMITTED:
            return False
        raise HostError(f"cannot set the size of the conntrack table to {wanted}", error) from error
    return True
