"""The loop's thread waits for no file, no other process and no network, only for the kernel.

The programs by which a backend writes to the kernel, and the start of relay workers, are part of a sync.
"""

import socket
import sys
from pathlib import Path

import pytest

from tests.shortage import loop_audit
from tests.shortage.node import MODES, node, vip

NODE_PORT = 30080
FEATURES = {
    "trafficMetrics": "endpoint", "removedEndpoints": "reset", "endpointHealth": "passive",
    "modeFromNodeLabel": "kproxy.dev/mode",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_the_loop_waits_for_the_kernel_alone(tmp_path: Path, mode: str) -> None:
    audited, notify = tmp_path / "audited", tmp_path / "notify"
    addresses = ["localhost", "primary"]
    with (
        node(tmp_path, mode, section=FEATURES, own_tables="never", nodePortAddresses=addresses) as here,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(str(notify))
        here.serve(1, NODE_PORT)
        under: list[str | Path] = [sys.executable, loop_audit.__file__, audited]
        environment = {"NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "500000"}
        with here.proxy("-v4", under=under, environment=environment) as proxy:
            here.await_answer(vip(1))
            here.await_answer("127.0.0.1", NODE_PORT)
            here.serve6(1)
            for number in (2, 3):
                here.serve(number)
                here.await_answer(vip(number))
            here.delete(2)
            here.await_true(lambda: not here.answers(vip(2)), "removal")
            here.serve(2, NODE_PORT + 1)
            here.await_answer(vip(2))
            here.network.run("nft", "flush ruleset")
            here.await_log("repaired foreign changes")
            here.await_answer(vip(1))
            for other in (*MODES, mode):
                here.command("switch", other)
                assert here.answers(vip(1))
            for port, path in ((10249, "/metrics"), (10249, "/configz"), (10256, "/healthz")):
                assert proxy.get(port, path)[0] == 200
            here.command("explain", vip(1))
            assert proxy.end()[0] == 0
        (other, *_) = (each for each in MODES if each != mode)
        here.configure("never", other)
        with here.proxy(under=under, environment=environment):
            here.await_answer(vip(1))
    assert audited.read_text().splitlines() == []
