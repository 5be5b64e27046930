"""Which mode serves, when that is not what the configuration says: kept on disk while a switch is under
way, and after it until the configuration names another mode.

The file lives as long as the rules do: in a directory that a reboot empties, one for each network
namespace (SO_NETNS_COOKIE of include/uapi/asm-generic/socket.h, Linux 5.14, is never used twice).
"""

import enum
import json
import logging
import os
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger("kproxy.run")

_SO_NETNS_COOKIE = 71


class Phase(enum.Enum):
    """How far a switch has come."""

    TRYING = "trying"
    """The rules of the new mode come in beside the old ones: to be rolled back."""
    SERVING = "serving"
    """The new mode serves: to be finished."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One switch."""

    configured: str
    """The mode in the configuration at that time; "": none."""
    before: str
    after: str
    phase: Phase

    @property
    def serving(self) -> str:
        """Which mode is to serve if the process starts now."""
        return self.after if self.phase is Phase.SERVING else self.before


class JournalFailed(Exception):
    """The file can't be written; one line for the operator."""


class Journal:
    """The file of this network namespace in *directory*."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"mode-{_namespace()}.json"

    def read(self) -> Entry | None:
        """What was written last; None: nothing, or nothing that makes sense (which is logged)."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return Entry(
                str(found["configured"]), str(found["before"]), str(found["after"]), Phase(found["phase"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the journal of mode switches can't be used", extra={
                "fields": {"file": str(self._path), "error": repr(error)}})
            return None

    def write(self, entry: Entry) -> None:
        """Keep *entry* instead of what was there. Raises JournalFailed."""
        beside = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("w", encoding="utf-8") as file:
                json.dump({**asdict(entry), "phase": entry.phase.value}, file)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(self._path)
        except OSError as error:
            raise JournalFailed(
                f"{self._path} can't be written ({error.strerror}): see kproxy.stateDirectory") from error

    def forget(self) -> None:
        """The configuration is right again."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the journal of mode switches stays", extra={
                "fields": {"file": str(self._path), "error": error.strerror}})

    def mode_to_start(self, configured: str, modes: Collection[str]) -> str:
        """Which of *modes* is to serve although *configured* is what the configuration says; "": that one.

        A switch that was not finished is finished or rolled back by that, for a start removes what other
        modes left. An entry for another configuration counts no more.
        """
        entry = self.read()
        if entry is None:
            return ""
        mode = entry.serving
        if entry.configured != configured or mode == configured or mode not in modes:
            self.forget()
            return ""
        return mode


def _namespace() -> str:
    """What tells this network namespace from all others since boot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            cookie = any_socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
            return str(int.from_bytes(cookie, "little"))
        except OSError:
            return f"inode-{os.stat('/proc/thread-self/ns/net').st_ino}"
