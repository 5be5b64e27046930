"""Removal of other proxies' leftovers, only after this mode serves, so that there is no gap.

kube-proxy cleans up at its start, before its own rules exist (1.36, cmd/kube-proxy/app/server_linux.go).
"""

import logging
import threading
from collections.abc import Callable, Collection

from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.timing import Repeats
from kproxy_core.modes.retirement import RetiringModes, report
from kproxy_core.modes.switch import ModeSwitch, SwitchFailed
from kproxy_core.observe.health import ProxyHealth

log = logging.getLogger("kproxy.run")

_RETRY = 10.0
"""Seconds until a failed proof is tried again."""


class Takeover:
    """Takes a node over from kube-proxy or from another mode."""

    def __init__(
        self, registry: Registry, settings_of: Callable[[str], BackendSettings], switch: ModeSwitch,
        retiring: RetiringModes, health: ProxyHealth, *, retry: float = _RETRY,
    ) -> None:
        """*retry*: seconds until a failed proof is tried again."""
        self._retry = retry
        self._registry = registry
        self._settings_of = settings_of
        self._switch = switch
        self._retiring = retiring
        self._health = health
        self._stopped = threading.Event()

    def start(self) -> None:
        """Remove the others' leftovers in the background once our rules are proven; then release health.

        Health does not wait for established connections (`RetiringModes`).
        """
        threading.Thread(target=self._take_over, name="kproxy-leftovers", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _take_over(self) -> None:
        mode = self._switch.instance.mode
        try:
            layers = self._registry.layers(mode)
            others = [other for other in self._registry.modes if other not in layers and self._left(other)]
            superseded = bool(self._registry.supersede(mode, dry_run=True).removed)
            if (others or superseded) and not self._proven([*others, *([mode] if superseded else [])]):
                return
            for other in others:
                self._retiring.retire(other)
            if superseded:
                report(mode, self._registry.supersede(mode, dry_run=False))
        finally:
            self._health.release()

    def _left(self, mode: str) -> bool:
        found = self._registry.cleanup(mode, self._settings_of(mode), dry_run=True)
        for problem in found.errors:
            log.warning("could not look for leftovers", extra={"fields": {"mode": mode, "error": problem}})
        return bool(found.removed)

    def _proven(self, left: Collection[str]) -> bool:
        """Wait until our rules are proven to work. Return False if stopped before."""
        repeats = Repeats()
        while not self._stopped.is_set():
            try:
                self._switch.prove()
                return True
            except SwitchFailed as error:
                self._health.hold(f"the leftovers of {', '.join(left)} are kept: {error}")
                if times := repeats.count(str(error)):
                    log.error("keeping leftovers until our rules are proven to work", extra={
                        "fields": {"left": ",".join(left), "error": str(error), "times": times}})
            self._stopped.wait(self._retry)
        return False
