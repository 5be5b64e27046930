"""Kernel settings under /proc/sys, of the calling thread's network namespace where they have one."""

from pathlib import Path

from kproxy_core.host.errors import HostError

_ROOT = Path("/proc/sys")


def read(name: str) -> str:
    """The value of *name*, such as ``net/ipv4/ip_forward``, without the line end.

    Raises HostError, with errno ENOENT if this kernel does not have it.
    """
    try:
        return (_ROOT / name).read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError(f"can't read sysctl {name}", error) from error


def ensure(name: str, value: int | str) -> bool:
    """Set *name* to *value* unless it is so already; True if it had to be changed.

    A read-only /proc/sys that holds the right values is no problem. Raises HostError.
    """
    wanted = str(value)
    if read(name).split() == wanted.split():
        return False
    try:
        (_ROOT / name).write_text(wanted, encoding="ascii")
    except OSError as error:
        raise HostError(f"can't set sysctl {name} to {wanted}", error) from error
    return True
