"""CAP_NET_ADMIN that a running process loses, and gets back."""

from pathlib import Path

from tests.shortage.node import node, vip

_THIEF = '''
import ctypes, os, struct
from kproxy_core.contract.hooks import hookimpl

@hookimpl(wrapper=True, tryfirst=True)
def kproxy_sync(update):
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("II", 0x20080522, 0), ctypes.create_string_buffer(24)
    assert not libc.capget(header, data)
    effective, *others = struct.unpack("6I", data.raw)
    net_admin = 1 << 12
    effective = effective & ~net_admin if os.path.exists({stolen!r}) else effective | net_admin
    assert not libc.capset(header, struct.pack("6I", effective, *others))
    return (yield)
'''
"""A plugin that syncs without the effective capability while a file exists."""


def test_changes_wait_for_the_capability_and_none_is_lost(tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    (tmp_path / "thief.py").write_text(_THIEF.format(stolen=str(stolen)))
    with node(tmp_path, "nftables") as here:
        here.serve(1)
        with here.proxy("-p", "thief", environment={"PYTHONPATH": str(tmp_path)}) as proxy:
            stolen.touch()
            here.serve(2)
            here.await_log("sync failed.*Operation not permitted")
            assert here.answers(vip(1))
            assert not here.answers(vip(2))
            stolen.unlink()
            here.await_answer(vip(2))
            proxy.await_health()
