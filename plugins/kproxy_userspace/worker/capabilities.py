"""Capabilities of a worker, which handles the bytes of clients (linux/capability.h)."""

import ctypes
import os
import struct

_VERSION_3 = 0x20080522
_NET_BIND_SERVICE = 1 << 10
_SETS = struct.Struct("=6I")
"""Effective, permitted and inheritable, of the capabilities 0 to 31; then of the others."""
_PR_SET_NO_NEW_PRIVS = 38


def drop_capabilities() -> None:
    """Keep at most CAP_NET_BIND_SERVICE, which the ports of Services may need, for good. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _VERSION_3, 0)
    sets = ctypes.create_string_buffer(_SETS.size)
    _check(libc.capget(header, sets))
    kept = _SETS.unpack(sets.raw)[1] & _NET_BIND_SERVICE
    _check(libc.capset(header, _SETS.pack(kept, kept, 0, 0, 0, 0)))
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
