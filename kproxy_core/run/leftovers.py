"""What others left in the kernel goes once this mode serves: never before, so there is no gap.

kube-proxy cleans up at its start, before its own rules exist (1.36, cmd/kube-proxy/app/server_linux.go).
"""

import logging
import threading
from collections.abc import Callable

from kproxy_core.backend.api import BackendSettings
from kproxy_core.backend.errors import BackendError
from kproxy_core.backend.registry import Registry
from kproxy_core.run.health import ProxyHealth

log = logging.getLogger("kproxy.run")


def clean_up_in_background(
    registry: Registry, mode: str, settings_of: Callable[[str], BackendSettings], health: ProxyHealth
) -> None:
    """Have every other mode than *mode* remove its traces; then release *health*. Returns at once."""

    def run() -> None:
        try:
            clean_up(registry, mode, settings_of)
        finally:
            health.release()

    threading.Thread(target=run, name="kproxy-leftovers", daemon=True).start()


def clean_up(registry: Registry, mode: str, settings_of: Callable[[str], BackendSettings]) -> None:
    """Have every other mode than *mode* remove its traces, and *mode* kube-proxy's; log what there was."""
    for other in registry.modes:
        try:
            if other == mode:
                found = registry.supersede(mode)
            else:
                found = registry.cleanup(other, settings_of(other), dry_run=False)
        except BackendError as error:
            log.warning("leftovers are not looked for", extra={
                "fields": {"mode": other, "error": str(error)}
            })
            continue
        if found.removed:
            log.info("removed what was left", extra={
                "fields": {"mode": other, "objects": len(found.removed), "first": found.removed[0]}
            })
        for problem in found.errors:
            log.warning("something that was left stays", extra={
                "fields": {"mode": other, "error": problem}
            })
