"""Kernel settings under /proc/sys; those of networking are the calling thread's network namespace's."""

from pathlib import Path

from kproxy_core.host.errors import HostError

_ROOT = Path("/proc/sys")


def read(name: str) -> str:
    """Return *name*, such as ``net/ipv4/ip_forward``. Raises HostError; its errno is ENOENT if unknown."""
    try:
        return (_ROOT / name).read_text(encoding="ascii").strip()
    except OSError as error:
        raise HostError(f"cannot read sysctl {name}", error) from error


def ensure(name: str, value: int | str) -> bool:
    """Set *name* to *value* and return True, unless it has that value already. Raises HostError."""
    wanted = str(value)
    if read(name).split() == wanted.split():
        return False
    try:
        (_ROOT / name).write_text(wanted, encoding="ascii")
    except OSError as error:
        raise HostError(f"cannot set sysctl {name} to {wanted}", error) from error
    return True
