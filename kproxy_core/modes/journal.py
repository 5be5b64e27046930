"""The journal of mode switches: the serving mode, and the one that served before the last switch.

It is written before and after each switch, and kept until the configuration names another mode. It lives as
long as the rules do: in a directory that a reboot empties, one file for each network namespace
(SO_NETNS_COOKIE of include/uapi/asm-generic/socket.h, Linux 5.14, is never used twice).
"""

import enum
import logging
import os
from collections.abc import Collection
from pathlib import Path

from msgspec import MsgspecError, Struct, json

from kproxy_core.linux.files import read_private, replace_private
from kproxy_core.linux.namespaces import namespace_name

log = logging.getLogger("kproxy.run")

_MOST_BYTES = 4096


class Phase(enum.Enum):
    """The progress of a switch."""

    TRYING = "trying"
    """The new mode's rules are being added beside the old ones. The next start rolls back."""
    SERVING = "serving"
    """The new mode serves. The next start finishes the switch."""


class Reason(enum.Enum):
    """The reason for which a mode serves."""

    CONFIGURATION = "configuration"
    """A start with this configuration chooses it."""
    SWITCH = "switch"
    """It was switched to, or stayed when another one that was configured failed."""
    LABEL = "label"
    """The Node's label names it."""


class Entry(Struct, frozen=True):
    configured: str
    """The mode in the configuration at that time; "": none."""
    before: str
    after: str
    phase: Phase
    reason: Reason = Reason.SWITCH
    """That of `serving`."""

    @property
    def serving(self) -> str:
        """The mode to serve in if the process starts now."""
        return self.after if self.phase is Phase.SERVING else self.before


class JournalFailed(Exception):
    """The file cannot be written; one line for the operator."""


class Journal:
    """The file of this network namespace in *directory*."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / f"mode-{namespace_name()}.json"

    def read(self) -> Entry | None:
        """Return the last entry. None: there is none, or the file is unusable, which is logged."""
        try:
            return json.decode(read_private(self._path, _MOST_BYTES), type=Entry)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, MsgspecError, RecursionError) as error:
            if not _belongs_to_another_user(error):
                log.warning("ignoring unusable journal of mode switches", extra={
                    "fields": {"file": str(self._path), "error": repr(error)}})
            return None

    def write(self, entry: Entry) -> None:
        """Replace the last entry by *entry*. Raises JournalFailed."""
        try:
            replace_private(self._path, json.encode(entry))
        except OSError as error:
            raise JournalFailed(
                f"cannot write {self._path} ({error.strerror}): see kproxy.stateDirectory") from error

    def clear(self) -> None:
        """Delete the entry: the configured mode serves."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            if not _belongs_to_another_user(error):
                log.warning("could not delete the journal of mode switches", extra={
                    "fields": {"file": str(self._path), "error": error.strerror}})

    def clear_unless_switched_to(self, configured: str) -> None:
        """Delete the entry, unless it is about a switch to the *configured* mode, which serves now."""
        if not self.mode_before(configured, configured):
            self.clear()

    def mode_before(self, configured: str, serving: str) -> str:
        """Return the mode that served before the switch to the *serving* one; "": none, or not known."""
        entry = self.read()
        if entry is None or (entry.configured, entry.serving) != (configured, serving):
            return ""
        return "" if entry.before == serving else entry.before

    def starting_mode(self, configured: str, modes: Collection[str], *, by_label: bool = False) -> str:
        """Return the mode of *modes* to start in instead of the *configured* one; "": the configured one.

        This finishes or rolls back an unfinished switch, because a start removes what other modes left. An
        entry for another configuration does not count: one with another mode, or, without *by_label*, one
        that let a label of the Node name the mode.
        """
        entry = self.read()
        if entry is None or entry.configured != configured or entry.serving not in modes:
            return ""
        if entry.reason is Reason.LABEL and not by_label:
            return ""
        return "" if entry.serving == configured else entry.serving


def _belongs_to_another_user(error: Exception) -> bool:
    """Return whether the directory is root's, and this process is not: it cannot have switched modes here."""
    return isinstance(error, PermissionError) and os.geteuid() != 0
