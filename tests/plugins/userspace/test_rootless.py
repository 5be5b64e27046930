"""kproxy as an unprivileged user: it serves, and logs no warnings about missing privileges."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core.other_user import as_nobody
from tests.patience import PATIENCE

KPROXY = Path(sys.executable).with_name("kproxy")
SHOP = Path(__file__).parents[3] / "examples" / "shop"


@pytest.mark.usefixtures("node")  # where no other process takes a port
def test_it_starts_without_a_warning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [
        str(KPROXY), "--mode=userspace", "--userspace-listen=127.0.0.80", f"--manifests={SHOP}",
        "--hostname-override=node1", "--healthz-bind-address=127.0.0.80:10256",
        "--metrics-bind-address=127.0.0.80:10249",
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(as_nobody(*command), stdin=subprocess.DEVNULL, stderr=out)
    try:
        deadline = time.monotonic() + PATIENCE
        while log.read_text().count("first sync") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # for log lines of other threads
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
    text = log.read_text()
    assert "listening service_port=shop/web:http port=80 at=127.0.0.80:" in text
    assert [line for line in text.splitlines() if " INFO " not in line] == []
    assert text.count("CAP_NET_ADMIN") == 1
