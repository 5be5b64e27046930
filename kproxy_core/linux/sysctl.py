"""Kernel settings under /proc/sys; network settings are read and set in the calling thread's namespace."""

from pathlib import Path

from kproxy_core.linux.errors import doing

_ROOT = Path("/proc/sys")


def read(name: str) -> str:
    """Return the value of *name*, such as ``net/ipv4/ip_forward``, without the line end.

    Raises HostError, with errno ENOENT if the kernel lacks the setting.
    """
    with doing(f"read sysctl {name}"):
        return (_ROOT / name).read_text(encoding="ascii").strip()


def ensure(name: str, value: int | str) -> bool:
    """Set *name* to *value* unless it already has it; return True if it was changed.

    Succeeds with a read-only /proc/sys that holds the value. Raises HostError.
    """
    wanted = str(value)
    if read(name).split() == wanted.split():
        return False
    with doing(f"set sysctl {name} to {wanted}"):
        (_ROOT / name).write_text(wanted, encoding="ascii")
    return True


def ensure_at_least(name: str, value: int) -> bool:
    """Set *name* to *value* unless it is that high; return True if it was changed. Raises HostError."""
    return int(read(name)) < value and ensure(name, value)
