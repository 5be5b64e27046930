"""A network namespace of its own for every test that writes to nf_tables."""

import ctypes
import os
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def netns() -> Iterator[None]:
    """The test's thread, and the threads it starts, are in an empty network namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_LIBC.unshare(_CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_LIBC.setns(home, _CLONE_NEWNET))
    finally:
        os.close(home)
