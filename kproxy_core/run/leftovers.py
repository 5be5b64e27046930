"""What others left in the kernel goes once this mode serves: never before, so there is no gap.

kube-proxy cleans up at its start, before its own rules exist (1.36, cmd/kube-proxy/app/server_linux.go).
"""

import logging
import threading

from kproxy_core.backend.errors import BackendError
from kproxy_core.backend.registry import Registry
from kproxy_core.run.health import ProxyHealth
from kproxy_core.run.retiring import Retiring, report

log = logging.getLogger("kproxy.run")


def clean_up_in_background(registry: Registry, mode: str, retiring: Retiring, health: ProxyHealth) -> None:
    """Have every other mode than *mode* remove its traces; then release *health*. Returns at once.

    What established connections need goes later (`Retiring`); health doesn't wait for that.
    """

    def run() -> None:
        try:
            for other in registry.modes:
                if other == mode:
                    _supersede(registry, mode)
                else:
                    retiring.add(other)
        finally:
            health.release()

    threading.Thread(target=run, name="kproxy-leftovers", daemon=True).start()


def _supersede(registry: Registry, mode: str) -> None:
    """Have *mode* remove what kube-proxy left in the same mode."""
    try:
        found = registry.supersede(mode)
    except BackendError as error:
        log.warning("leftovers are not looked for", extra={"fields": {"mode": mode, "error": str(error)}})
        return
    report(mode, found)
