"""Modes that serve no longer: what they left goes, and what established connections need goes after those."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kproxy_core.backend.api import BackendSettings, Leftovers, Measurement
from kproxy_core.backend.errors import BackendError
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry

log = logging.getLogger("kproxy.run")

INTERVAL = 2.0
"""Seconds between two looks at connections that are waited for."""
_TRIES = 5
"""Looks that may go wrong one after another: nobody knows then who waits."""


@dataclass(slots=True)
class _Leaving:
    mode: str
    instance: BackendInstance | None
    """The backend that served; None: an earlier process did."""
    traces: bool = True
    """What it left in the kernel is to be removed, too."""
    waiting: int = 0
    failures: int = 0
    """Looks that went wrong since one did not."""


class Retiring:
    """All methods may be called from any thread; one of its own waits for connections."""

    def __init__(
        self, registry: Registry, settings_of: Callable[[str], BackendSettings], serving: str
    ) -> None:
        self._registry = registry
        self._settings_of = settings_of
        self._serving = {serving}
        """Modes that serve, or are being tried."""
        self._changed = threading.Condition()
        self._leaving: list[_Leaving] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def measure(self) -> list[Measurement]:
        """For the metrics endpoint; never waits for who removes something."""
        return [
            Measurement("kproxy_retiring_connections", "Connections that still go through a mode that serves "
                        "no longer", "gauge", leaving.waiting, {"mode": leaving.mode})
            for leaving in list(self._leaving)
        ]  # fmt: skip

    def add(self, mode: str, instance: BackendInstance | None = None) -> int:
        """Begin to remove what *mode* left; returns for how many connections' sake something stays.

        Without a *instance*, what was left by whom; not while the mode serves.
        """
        with self._changed:
            layers: tuple[str, ...] = (mode,)
            if instance is not None:
                self._serving.discard(mode)
                layers = self._registry.layers(mode)
            return sum(self._leave(layer, instance if layer == mode else None) for layer in reversed(layers))

    def call_off(self, mode: str) -> bool:
        """*mode* is to serve: leave in the kernel what is there. A backend of it still finishes its own.

        True if something was still to be removed.
        """
        with self._changed:
            self._serving.add(mode)
            layers = self._registry.layers(mode)
            called_off = [leaving for leaving in self._leaving if leaving.mode in layers and leaving.traces]
            for leaving in called_off:
                leaving.traces = False
            return bool(called_off)

    def _leave(self, mode: str, instance: BackendInstance | None) -> int:
        """Start retiring one layer; return how many connections still depend on it. The lock is held."""
        is_in_use = any(mode in self._registry.layers(serving) for serving in self._serving)
        if self._closed or (is_in_use and instance is None):
            return 0
        leaving = _Leaving(mode, instance, traces=not is_in_use)
        if self._step(leaving):
            return 0
        self._leaving.append(leaving)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kproxy-retiring", daemon=True)
            self._thread.start()
        return leaving.waiting

    def close(self) -> None:
        """Let all backends go, with the connections that they carry; what is in the kernel stays."""
        with self._changed:
            self._closed = True
            leaving, self._leaving = self._leaving, []
            self._changed.notify_all()
        for one in leaving:
            if one.instance is not None:
                self._registry.close_backend(one.instance)

    def _run(self) -> None:
        with self._changed:
            while self._leaving:
                self._changed.wait(INTERVAL)
                self._leaving = [leaving for leaving in self._leaving if not self._step(leaving)]
            self._thread = None

    def _step(self, leaving: _Leaving) -> bool:
        """One look. True: nothing of it is left."""
        try:
            settings = self._settings_of(leaving.mode)
            found = self._registry.retire(
                leaving.mode, settings, instance=leaving.instance, traces=leaving.traces)
            report(leaving.mode, found)
            leaving.waiting = found.waiting
            leaving.failures = leaving.failures + 1 if found.errors else 0
            if found.waiting or 0 < leaving.failures < _TRIES:
                return False
            if leaving.instance is not None:
                instance, leaving.instance = leaving.instance, None
                self._registry.close_backend(instance)
            if leaving.traces:
                found = self._registry.cleanup(leaving.mode, settings, dry_run=False)
                report(leaving.mode, found)
        except Exception as error:  # noqa: BLE001 - a plugin's; the mode that serves must go on
            problem = str(error) if isinstance(error, BackendError) else repr(error)
            log.warning("leftovers are not looked for", extra={
                "fields": {"mode": leaving.mode, "error": problem}})
        return True


def report(mode: str, found: Leftovers) -> None:
    """A line in the log if something was removed, and one for each thing that could not be."""
    if found.removed:
        log.info("removed what was left", extra={
            "fields": {"mode": mode, "objects": len(found.removed), "first": found.removed[0]}})
    for problem in found.errors:
        log.warning("something that was left stays", extra={"fields": {"mode": mode, "error": problem}})
