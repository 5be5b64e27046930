"""A running proxy says when it can't read its manifests."""

import time
from pathlib import Path

from tests.core.cli.test_cli import manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import Proxy, running
from tests.patience import PATIENCE

__all__ = ["manifests", "node"]


def assert_health(proxy: Proxy, status: int, missing: str = "") -> None:
    """Return once /healthz answers *status*, and names the *missing* directory or none."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found, text = proxy.health()
        if found == status and (missing in text if missing else "missing" not in text):
            return
        assert time.monotonic() < deadline, (found, text)
        time.sleep(0.05)


def test_a_missing_directory_of_manifests_is_in_healthz(node: Namespace, manifests: Path) -> None:
    elsewhere = manifests.with_name("elsewhere")
    manifests.rename(elsewhere)
    missing = f"directory {manifests} is missing, waiting for it"
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--hostname-override=node1") as proxy:
        assert_health(proxy, 503, missing)
        elsewhere.rename(manifests)
        assert_health(proxy, 200)
        manifests.rename(elsewhere)
        assert_health(proxy, 200, missing)  # serves what it had
        (manifests.parent / "third").mkdir()
        (manifests.parent / "third").rename(manifests)
        assert_health(proxy, 200)
