"""Root without capabilities, for a while: the kit makes the kernel refuse a backend's requests."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)
_VERSION_3 = 0x20080522
_PR_SET_SECUREBITS = 28
_NOROOT = 1 << 0


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32),
    )  # fmt: skip


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Drop all capabilities of the calling thread and the programs it starts (see capabilities(7)).

    Existing threads and processes keep theirs. Raises OSError if they cannot be dropped.
    """
    held = (_Sets * 2)()
    _check(_LIBC.capget(ctypes.byref(_header()), ctypes.byref(held)))
    # Otherwise a program started by root would regain all of them.
    _check(_LIBC.prctl(_PR_SET_SECUREBITS, _NOROOT, 0, 0, 0))
    try:
        none = (_Sets * 2)(*(_Sets(0, part.permitted, 0) for part in held))
        _check(_LIBC.capset(ctypes.byref(_header()), ctypes.byref(none)))
        try:
            yield
        finally:
            _check(_LIBC.capset(ctypes.byref(_header()), ctypes.byref(held)))
    finally:
        _check(_LIBC.prctl(_PR_SET_SECUREBITS, 0, 0, 0, 0))


def _header() -> _Header:
    return _Header(_VERSION_3, 0)


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
