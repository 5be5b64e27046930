"""The kernel state of a node while kproxy serves."""

import re
import time
from collections.abc import Sequence

from tests.core.golden import golden
from tests.core.namespaces import Namespace
from tests.core.processes import running
from tests.leftovers.kernel import held
from tests.patience import PATIENCE

LOOK = 0.5
"""Seconds between two looks, each of which starts a dozen programs."""

_RELAY_PORT = re.compile(r"(--to-ports |KUBE-NODEPORT-NON-LOCAL .*--dport )\d+")
"""The port differs every time."""


def served(node: Namespace, mode: str, expected: Sequence[str] = ()) -> list[str]:
    """Return the kernel state once *mode* serves, waiting until it is *expected* if that is given."""
    manifests = golden("iptables/loadbalancer-source-ranges-ipv4/objects.yaml").parent
    with running(node, f"--mode={mode}", f"--manifests={manifests}", "--hostname-override=kc-node") as proxy:
        proxy.await_health()
        deadline = time.monotonic() + PATIENCE
        while (found := _seen(node)) != expected and expected and time.monotonic() < deadline:
            time.sleep(LOOK)
    return found


def _seen(node: Namespace) -> list[str]:
    return sorted(_RELAY_PORT.sub(r"\1PORT", line) for line in held(node))
