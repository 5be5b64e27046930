"""Memory that is freed in the middle of the heap."""

import ctypes
from pathlib import Path

from msgspec.structs import replace

from kproxy_core.app.preparation import FreedMemory
from kproxy_core.contract.values import Scope
from kproxy_core.model.address import Family
from tests.core.sync_events import synced

BLOCK, BLOCKS = 32 << 10, 800
FREED = BLOCK * BLOCKS


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def test_a_full_sync_after_the_first_returns_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    # With one block left in each half MiB, the top of the heap cannot sink.
    for place, block in enumerate(blocks):
        if place % 16 != 15:
            libc.free(block)
    held = resident()
    observer, full = FreedMemory(), replace(synced(Family.IPV4), scope=Scope.RESYNC)
    for without in (replace(full, is_first=True), synced(Family.IPV4)):
        observer.sync_succeeded(without)
        assert resident() > held - FREED // 4
    observer.sync_succeeded(full)
    assert resident() < held - FREED // 2
    for block in blocks[15::16]:
        libc.free(block)
