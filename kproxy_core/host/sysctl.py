"""Kernel settings under /proc/sys; network settings are read and set in the calling thread's namespace."""

from pathlib import Path

from kproxy_core.host.errors import HostError

_ROOT = Path("/proc/sys")


def read(name: str) -> str:
    """Return the value of *name*, such as ``net/ipv4/ip_forward``, without the line end.

    Raises HostError, with errno ENOENT if the kernel lacks the setting.
    """
    try:
        return (_ROOT / name).read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError(f"cannot read sysctl {name}", error) from error


def ensure(name: str, value: int | str) -> bool:
    """Set *name* to *value* unless it already has it; return True if it was changed.

    Succeeds with a read-only /proc/sys that holds the value. Raises HostError.
    """
    wanted = str(value)
    if read(name).split() == wanted.split():
        return False
    try:
        (_ROOT / name).write_text(wanted, encoding="ascii")
    except OSError as error:
        raise HostError(f"cannot set sysctl {name} to {wanted}", error) from error
    return True
