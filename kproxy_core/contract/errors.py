"""The errors that a backend raises. The sync loop distinguishes them by type and never parses a message."""

from collections.abc import Collection

from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey


class BackendError(Exception):
    """Any failure that a backend reports."""


class SyncFailed(BackendError):
    """The kernel refused an update as a whole, and the backend remembers nothing of it.

    The loop retries the same changes after a growing delay. If service ports are the cause, it syncs without
    them, and tries them again later: those that the error names, else those that it finds by halves.
    """

    def __init__(self, *args: object, service_ports: Collection[ServicePortKey] = ()) -> None:
        """*service_ports*: the only ones that could not be programmed; (): unknown."""
        super().__init__(*args)
        self.service_ports = frozenset(service_ports)


class TrustLost(SyncFailed):
    """The kernel does not hold what it has acknowledged to the backend.

    The loop follows up with a full update, for which the backend reads the kernel afresh.
    """


class Unsupported(BackendError):
    """This kernel or machine lacks what the backend needs; retrying is pointless."""

    def __init__(self, problem: str = "", family: Family | None = None) -> None:
        """*family* is the only IP family that cannot be served; None: none can."""
        super().__init__(problem)
        self.family = family


class InvalidInput(BackendError):
    """The operator named a mode, plugin or option that does not exist, or gave an option a wrong value."""


class InvalidOption(InvalidInput):
    """An option of the mode has a wrong value or an unknown name, so kproxy does not start in any mode."""

    def __init__(self, settings: BackendSettings, name: str, value: object, problem: str) -> None:
        """*name*: as in `BackendSettings.options`. The message has the flag or the path in the file."""
        super().__init__(f"{settings.sources.get(name, name)}: {value!r}: {problem}")


class PluginFailed(BackendError):
    """A hook raised what its contract does not allow, or returned a wrong type. The call has failed."""

    def __init__(self, plugin: str, hook: str, problem: str) -> None:
        super().__init__(f"plugin {plugin!r}: {hook} {problem}")


def one_line(error: BaseException) -> str:
    """Return the message of a foreign *error* in one line, with everything escaped that is not printable."""
    try:
        text = "; ".join(filter(None, (" ".join(line.split()) for line in str(error).splitlines())))
    except Exception:  # noqa: BLE001 - the message is computed by foreign code
        text = "an exception without a message"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
