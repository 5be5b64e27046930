"""The file that keeps totals from one process to the next, until the machine restarts."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kproxy_core.backend.api import Connections
from kproxy_core.host.conntrack.volumes import Volumes
from kproxy_core.host.files.private import read_private, replace_private
from kproxy_core.host.namespaces import namespace_name
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.traffic.totals import Total

log = logging.getLogger("kproxy.run")

_MOST_BYTES = 256 << 20


class Stored(NamedTuple):
    """The content of the file, apart from the machine's boot id."""

    mode: str | None = None
    """The mode that counted; "": its counts could not be read; None: no process has counted."""
    totals: dict[ServicePortKey, Total] = {}  # noqa: RUF012 - immutable by agreement
    counts: Sequence[tuple[Family, Connections]] = ()
    """The last counts of that mode."""
    alive: Volumes = {}  # noqa: RUF012
    """See `VolumeReader.alive`."""


class StoredTotals:
    """Reads and writes the file. Its totals and counts are of the same reading.

    If the kernel counts without the process too, the totals are exact again after the next reading,
    even if the file is old.
    """

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"traffic-{namespace_name()}.msgpack"
        self._failed = False

    def read(self, now: float) -> Stored:
        """Return the content; empty if there is no such file.

        *now* is the time that all totals get as that of their last connection.
        """
        try:
            content = read_private(self._path, _MOST_BYTES)
            boot, found = msgspec.msgpack.decode(content, type=tuple[str, Stored])
            if boot != _boot_id():
                return Stored()
        except FileNotFoundError:
            return Stored()
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("traffic totals of the last process are not used", extra={
                "fields": {"file": str(self._path), "error": str(error)}})
            return Stored()
        for total in found.totals.values():
            total.resume(now)
        return found

    def write(self, content: Stored) -> None:
        """Replace the file. A failure is logged once."""
        try:
            replace_private(self._path, msgspec.msgpack.encode((_boot_id(), content)))
        except OSError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "cannot keep traffic totals across a restart", extra={
                "fields": {"file": str(self._path), "error": error.strerror}})
            self._failed = True


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
