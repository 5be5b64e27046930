"""The switch of a running node from one mode to another, without breaking a connection.

ARCHITECTURE.md draws the steps. A failed one is rolled back. kube-proxy removes the old mode's rules before
the new ones exist (1.36, cmd/kube-proxy/app/server_linux.go).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from msgspec import Struct

from kproxy_core.backend.api import BackendSettings, Caveat, Leftovers, Scope, SyncReport, Update
from kproxy_core.backend.errors import BackendError, SyncFailed, Unsupported
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry
from kproxy_core.modes.control import ReportProgress
from kproxy_core.modes.journal import Entry, Journal, JournalFailed, Phase
from kproxy_core.modes.proof import ProofFailed, prove
from kproxy_core.modes.retiring import RetiringModes, report
from kproxy_core.modes.starting import start_backend
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeSettings
from kproxy_core.timing.pacing import Pacing

log = logging.getLogger("kproxy.run")

_TRIES = 3
"""Attempts to sync the new mode."""
_PAUSE = 0.5
"""Seconds between two attempts."""


class SwitchFailed(Exception):
    """The old mode still serves; one line says why."""


class Terms(Struct, frozen=True, kw_only=True):
    settings: BackendSettings
    node: NodeSettings
    pacing: Callable[[], Pacing]


class Comparison(Struct, frozen=True):
    """The caveats by which two modes differ for this node's Services."""

    appearing: tuple[Caveat, ...]
    """Caveats of the new mode alone."""
    disappearing: tuple[Caveat, ...]
    """Caveats of the old mode alone."""

    @property
    def loses(self) -> bool:
        """True if the new mode would not serve something that the old one serves."""
        return (
            any(caveat.lost for caveat in self.appearing)
            or any(caveat.only_here for caveat in self.disappearing)
        )


class ModeSwitch:
    """Switches modes, one switch at a time. Every method may be called from any thread but the loop's."""

    def __init__(
        self, loop: Loop, registry: Registry, retiring: RetiringModes, journal: Journal, *,
        instance: BackendInstance, configured: str, terms: Callable[[str], Terms],
        mode_changed: Callable[[BackendInstance], None],
    ) -> None:
        """*instance* serves already. *configured* is the configuration's mode, "" for none.

        *terms* raises what a wrong configuration raises. *mode_changed* is called after each switch.
        """
        self._loop = loop
        self._registry = registry
        self._retiring = retiring
        self._journal = journal
        self.configured = configured
        """The mode in the configuration; "": none."""
        self._terms = terms
        self._mode_changed = mode_changed
        self._busy = threading.Lock()
        self.instance = instance
        """The backend that serves."""

    def compare(self, mode: str) -> Comparison:
        """Compare *mode* with the one that serves. Raises SwitchFailed if it cannot serve here."""
        with _failures():
            detection = self._registry.detect(mode, self._terms(mode).settings)
            if not detection.usable:
                raise SwitchFailed(_does_not_work(mode, detection.because))
            before, after = self._caveats(self.instance.mode), self._caveats(mode)
        return Comparison(
            tuple(caveat for caveat in after if caveat not in before),
            tuple(caveat for caveat in before if caveat not in after),
        )

    def switch_to(self, mode: str, report_progress: ReportProgress, *, configured: str | None = None) -> None:
        """Switch to *mode*. *configured* is the configuration's new mode, if that has changed.

        Raises SwitchFailed if the old mode still serves.
        """
        if not self._busy.acquire(blocking=False):
            raise SwitchFailed("another switch is in progress")
        try:
            if configured is not None:
                self.configured = configured
            if mode == self.instance.mode:
                report_progress(f"{mode} already serves")
                self._settle(mode)
                return
            if not self._loop.settled:
                raise SwitchFailed(f"{self.instance.mode} is not in sync yet")
            with _failures():
                self._switch(mode, report_progress)
        finally:
            self._busy.release()

    def prove(self) -> None:
        """Prove that the serving mode's rules are in the kernel and work. Raises SwitchFailed."""
        with self._busy, _failures():
            terms, instance = self._terms(self.instance.mode), self.instance
            try:
                self._loop.call(self._loop.hold)
                updates = self._loop.call(partial(self._loop.updates, terms.node))
                prove(self._loop, instance, updates, log.debug)
            finally:
                self._loop.call(
                    lambda: self._loop.serve_with(instance, terms.node, terms.pacing, Scope.CHANGED))

    def _switch(self, mode: str, report_progress: ReportProgress) -> None:
        terms, old = self._terms(mode), self.instance
        try:
            new = self._loop.call(partial(start_backend, self._registry, mode, terms.settings))
        except Unsupported as error:
            raise SwitchFailed(_does_not_work(mode, str(error))) from error
        report_progress(f"{mode} works here")
        try:
            self._journal.write(Entry(self.configured, old.mode, mode, Phase.TRYING))
        except JournalFailed:
            self._registry.close_backend(new)
            raise
        if self._retiring.cancel(mode):  # The node may have changed to another variant of iptables.
            report(mode, self._registry.supersede(mode, dry_run=False))
        log.info("switching modes", extra={"fields": {"before": old.mode, "after": mode}})
        try:
            self._try_out(new, terms.node, report_progress)
            self._journal.write(Entry(self.configured, old.mode, mode, Phase.SERVING))
        except Exception as error:
            report_progress(f"rolling back: {error}")
            self._roll_back(new)
            raise
        self._loop.call(lambda: self._loop.serve_with(new, terms.node, terms.pacing, Scope.CHANGED))
        self.instance = new
        self._mode_changed(new)
        report_progress(f"{mode} serves")
        log.info("switched modes", extra={"fields": {"before": old.mode, "after": mode}})
        left = self._retiring.retire(old.mode, old)
        if old.mode in self._registry.layers(mode):
            report_progress(f"the rules of {old.mode} are kept: {mode} needs them")
        else:
            report_progress(_rest(left))
        self._settle(mode)

    def _try_out(self, new: BackendInstance, node: NodeSettings, report_progress: ReportProgress) -> None:
        """Program everything and prove it. Raises ProofFailed, or whatever the backend raises."""
        loop = self._loop

        def program() -> list[Update]:
            loop.hold()
            updates = loop.updates(node)
            for update in updates:
                synced = _sync(new, update)
                if synced.degraded:
                    raise ProofFailed(f"{new.mode}: {synced.degraded}")
                for key, problem in synced.unserved.items():
                    raise ProofFailed(f"{new.mode}: {key} would not be served: {problem}")
            return updates

        updates = loop.call(program)
        report_progress(f"programmed {max(len(update.plans) for update in updates)} service ports")
        prove(loop, new, updates, report_progress)

    def _roll_back(self, new: BackendInstance) -> None:
        """Resync the old mode, then retire the new one."""
        old = self.instance
        terms = self._terms(old.mode)

        def restore() -> None:
            try:
                for update in self._loop.updates(terms.node):
                    _sync(old, update)
            finally:  # the loop retries whatever could not be restored now
                self._loop.serve_with(old, terms.node, terms.pacing, Scope.RESYNC)

        try:
            self._loop.call(restore)
        except Exception as error:  # noqa: BLE001 - the new mode's rules may be the only ones
            log.error("could not roll back the switch; the next start removes its leftovers", extra={
                "fields": {"mode": old.mode, "tried": new.mode, "error": repr(error)}})
            self._registry.close_backend(new)
            return
        self._retiring.retire(new.mode, new)
        self._settle(old.mode)
        log.warning("rolled back the switch", extra={"fields": {"mode": old.mode, "tried": new.mode}})

    def _settle(self, mode: str) -> None:
        """Keep a journal entry only if *mode*, which serves, is not the configured one."""
        if mode == self.configured:
            self._journal.clear()
        else:
            self._journal.write(Entry(self.configured, mode, mode, Phase.SERVING))

    def _caveats(self, mode: str) -> list[Caveat]:
        terms = self._terms(mode)

        def ask() -> list[Caveat]:
            found = [self._registry.caveats(mode, update, terms.settings)
                     for update in self._loop.updates(terms.node)]
            return list(dict.fromkeys(caveat for caveats in found for caveat in caveats))

        return self._loop.call(ask)


def _rest(left: Leftovers) -> str:
    if left.waiting:
        use = "connections still use" if left.waiting > 1 else "connection still uses"
        return f"{left.waiting} {use} {left.mode}"
    if left.in_grace:
        return f"{left.mode} is removed in a few seconds: connections to it may be on their way"
    return f"{left.mode} is removed"


def _does_not_work(mode: str, because: str) -> str:
    return f"{mode} does not work here: {because}"


def _sync(instance: BackendInstance, update: Update) -> SyncReport:
    """Sync, and retry a failure: another process may hold a lock. Raises SyncFailed."""
    for _ in range(_TRIES - 1):
        try:
            return instance.sync(update)
        except SyncFailed:
            time.sleep(_PAUSE)
    return instance.sync(update)


@contextmanager
def _failures() -> Iterator[None]:
    """Turn every failure into a SwitchFailed, and log those that only a bug explains."""
    try:
        yield
    except SwitchFailed:
        raise
    except (BackendError, JournalFailed, ProofFailed) as error:
        raise SwitchFailed(str(error)) from error
    except Exception as error:
        log.exception("mode switch failed unexpectedly")
        raise SwitchFailed(repr(error)) from error
