"""Modes that no longer serve: their rules are removed, those in use once their connections have ended."""

import logging
import threading
from collections.abc import Callable

from msgspec import Struct

from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Leftovers, Measurement

log = logging.getLogger("kproxy.run")

INTERVAL = 2.0
"""Seconds between two checks for remaining connections."""
_TRIES = 5
"""Consecutive checks that may fail before the mode is cleaned up regardless."""


class _RetiringMode(Struct):
    mode: str
    instance: BackendInstance | None
    """The backend that served; None: an earlier process did."""
    found: Leftovers
    """The result of the last check."""
    traces: bool = True
    """Remove its rules from the kernel, too."""
    failures: int = 0
    """Consecutive failed checks."""


class RetiringModes:
    """Removes modes that no longer serve. Every method may be called from any thread."""

    def __init__(
        self, registry: Registry, settings_of: Callable[[str], BackendSettings], serving: str,
        ended: Callable[[], None] = lambda: None, *, interval: float = INTERVAL,
    ) -> None:
        """*ended* is called, on any thread, after nothing is left of a mode."""
        self._interval = interval
        self._registry = registry
        self._settings_of = settings_of
        self._serving = {serving}
        """Modes that serve or are being tried."""
        self._ended = ended
        self._changed = threading.Condition()
        self._leaving: list[_RetiringMode] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def measure(self) -> list[Measurement]:
        """Return the remaining connections of each mode. Never blocks on a removal."""
        return [
            Measurement("kproxy_retiring_connections", "Connections that still depend on a mode that no "
                        "longer serves", "gauge", leaving.found.waiting, {"mode": leaving.mode})
            for leaving in list(self._leaving)
        ]  # fmt: skip

    def retire(self, mode: str, instance: BackendInstance | None = None) -> Leftovers:
        """Start removing the leftovers of *mode*. Return the result of the first check.

        Without an *instance*, remove what any earlier process left. Does nothing while the mode is serving.
        """
        with self._changed:
            layers: tuple[str, ...] = (mode,)
            if instance is not None:
                self._serving.discard(mode)
                layers = self._registry.layers(mode)
            return Leftovers.merged([
                self._leave(layer, instance if layer == mode else None) for layer in reversed(layers)
            ], mode)

    def cancel(self, mode: str) -> bool:
        """Keep the rules of *mode*, which is about to serve. A retiring backend still finishes.

        Return whether anything was still to be removed.
        """
        with self._changed:
            self._serving.add(mode)
            layers = self._registry.layers(mode)
            cancelled = [leaving for leaving in self._leaving if leaving.mode in layers and leaving.traces]
            for leaving in cancelled:
                leaving.traces = False
            return bool(cancelled)

    def _leave(self, mode: str, instance: BackendInstance | None) -> Leftovers:
        """Start retiring one layer; return the result of the first check. The lock is held."""
        is_in_use = any(mode in self._registry.layers(serving) for serving in self._serving)
        if self._closed or (is_in_use and instance is None):
            return Leftovers(mode=mode)
        leaving = _RetiringMode(mode, instance, Leftovers(mode=mode), traces=not is_in_use)
        if self._step(leaving):
            return leaving.found
        self._leaving.append(leaving)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kproxy-retiring", daemon=True)
            self._thread.start()
        return leaving.found

    def close(self) -> None:
        """Close all retiring backends with the connections that they carry. Leave the kernel as it is."""
        with self._changed:
            self._closed = True
            leaving, self._leaving = self._leaving, []
            self._changed.notify_all()
        for one in leaving:
            if one.instance is not None:
                one.instance.close()

    def _run(self) -> None:
        with self._changed:
            while self._leaving:
                self._changed.wait(self._interval)
                self._leaving = [leaving for leaving in self._leaving if not self._step(leaving)]
            self._thread = None

    def _step(self, leaving: _RetiringMode) -> bool:
        """Check and remove once. Return whether nothing is left."""
        try:
            settings = self._settings_of(leaving.mode)
            found = self._registry.retire(
                leaving.mode, settings, instance=leaving.instance, traces=leaving.traces)
            report(leaving.mode, found)
            leaving.found = found
            leaving.failures = leaving.failures + 1 if found.errors else 0
            if found.is_needed or 0 < leaving.failures < _TRIES:
                return False
            if leaving.instance is not None:
                instance, leaving.instance = leaving.instance, None
                instance.close()
            if leaving.traces:
                found = self._registry.cleanup(leaving.mode, settings, dry_run=False)
                report(leaving.mode, found)
        except Exception as error:  # noqa: BLE001 - a plugin's; the mode that serves must go on
            problem = str(error) if isinstance(error, BackendError) else repr(error)
            log.warning("could not look for leftovers", extra={
                "fields": {"mode": leaving.mode, "error": problem}})
        self._ended()
        return True


def report(mode: str, found: Leftovers) -> None:
    """Log the removed objects in one line, and every failure in a line of its own."""
    if found.removed:
        log.info("removed leftovers", extra={
            "fields": {"mode": mode, "objects": len(found.removed), "first": found.removed[0]}})
    for problem in found.errors:
        log.warning("could not remove leftovers", extra={"fields": {"mode": mode, "error": problem}})
