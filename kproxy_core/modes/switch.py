"""A running node goes from one mode to another, and no connection notices.

The new mode's rules come in beside the old ones, are read back, and a connection is sent through them; only
then the new mode serves, and the old one retires. A step that fails is rolled back; a process that is killed
leaves a `Journal`, and the next one finishes or rolls back. kube-proxy removes the old mode's rules before
the new ones exist (1.36, cmd/kube-proxy/app/server_linux.go).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kproxy_core.backend.api import BackendSettings, Caveat, Scope, SyncReport, Update
from kproxy_core.backend.errors import BackendError, SyncFailed, Unsupported
from kproxy_core.backend.instance import BackendInstance
from kproxy_core.backend.registry import Registry
from kproxy_core.modes.beginning import begin
from kproxy_core.modes.journal import Entry, Journal, JournalFailed, Phase
from kproxy_core.modes.proof import NotProven, Tell, prove
from kproxy_core.modes.retiring import Retiring, report
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeSettings
from kproxy_core.timing.pacing import Pacing

log = logging.getLogger("kproxy.run")

_TRIES = 3
"""Syncs of the new mode before it is given up."""
_PAUSE = 0.5
"""Seconds between them."""


class SwitchFailed(Exception):
    """The mode is what it was; one line says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a mode would serve with, as the configuration has it."""

    settings: BackendSettings
    node: NodeSettings
    pacing: Callable[[], Pacing]


@dataclass(frozen=True, slots=True)
class Difference:
    """What changes for this node's Services with the mode."""

    comes: tuple[Caveat, ...]
    """The new mode has it, the old one did not."""
    goes: tuple[Caveat, ...]

    @property
    def loses(self) -> bool:
        """Something would not be served any more."""
        return any(caveat.lost for caveat in self.comes) or any(caveat.only_here for caveat in self.goes)


class Switch:
    """Does one switch at a time. All methods may be called from any thread but the loop's."""

    def __init__(
        self,
        loop: Loop,
        registry: Registry,
        retiring: Retiring,
        journal: Journal,
        *,
        instance: BackendInstance,
        configured: str,
        terms: Callable[[str], Terms],
        serves: Callable[[BackendInstance], None],
    ) -> None:
        """*instance* serves at first; *configured*: the configuration's mode, "" for none.

        *terms* raises what a wrong configuration raises; *serves* is told who serves from now on.
        """
        self._loop = loop
        self._registry = registry
        self._retiring = retiring
        self._journal = journal
        self.configured = configured
        """The mode in the configuration; "": none."""
        self._terms = terms
        self._serves = serves
        self._busy = threading.Lock()
        self.instance = instance
        """Who serves."""

    def compare(self, mode: str) -> Difference:
        """What would change with *mode*. Raises SwitchFailed if it can't serve here."""
        now, then = self.instance.mode, mode
        with _failures():
            self._usable(mode)
            caveats = {of: self._caveats(of) for of in (now, then)}
        return Difference(
            tuple(caveat for caveat in caveats[then] if caveat not in caveats[now]),
            tuple(caveat for caveat in caveats[now] if caveat not in caveats[then]),
        )

    def to(self, mode: str, tell: Tell, *, configured: str | None = None) -> None:
        """Have *mode* serve. *configured*: what the configuration says from now on, if that changed.

        Raises SwitchFailed if the old mode still serves.
        """
        if not self._busy.acquire(blocking=False):
            raise SwitchFailed("another switch is under way")
        try:
            if configured is not None:
                self.configured = configured
            if mode == self.instance.mode:
                tell(f"{mode} serves already")
                self._settle(mode)
                return
            if not self._loop.settled:
                raise SwitchFailed(f"{self.instance.mode} is not in sync yet")
            with _failures():
                self._go(mode, tell)
        finally:
            self._busy.release()

    def prove(self) -> None:
        """See that what serves is in the kernel and at work. Raises SwitchFailed."""
        with self._busy, _failures():
            terms, instance = self._terms(self.instance.mode), self.instance

            def begin() -> list[Update]:
                self._loop.hold()
                return self._loop.updates(terms.node)

            try:
                prove(self._loop, instance, self._loop.call(begin), lambda line: log.debug(line))
            finally:
                self._loop.call(
                    lambda: self._loop.serve_with(instance, terms.node, terms.pacing, Scope.CHANGED))

    def _go(self, mode: str, tell: Tell) -> None:
        terms, old = self._terms(mode), self.instance
        try:
            new = self._loop.call(partial(begin, self._registry, mode, terms.settings))
        except Unsupported as error:
            raise SwitchFailed(_does_not_work(mode, str(error))) from error
        tell(f"{mode} works here")
        try:
            self._journal.write(Entry(self.configured, old.mode, mode, Phase.TRYING))
        except JournalFailed:
            self._registry.close_backend(new)
            raise
        if self._retiring.call_off(mode):  # The node may use another interface of iptables by now.
            report(mode, self._registry.supersede(mode, dry_run=False))
        log.info("the mode is being switched", extra={"fields": {"before": old.mode, "after": mode}})
        try:
            self._try_out(new, terms.node, tell)
            self._journal.write(Entry(self.configured, old.mode, mode, Phase.SERVING))
        except Exception as error:
            tell(f"rolling back: {error}")
            self._roll_back(new)
            raise
        self._loop.call(lambda: self._loop.serve_with(new, terms.node, terms.pacing, Scope.CHANGED))
        self.instance = new
        self._serves(new)
        tell(f"{mode} serves")
        log.info("the mode was switched", extra={"fields": {"before": old.mode, "after": mode}})
        waiting = self._retiring.add(old.mode, old)
        tell(f"{waiting} connections still go through {old.mode}" if waiting else f"{old.mode} is gone")
        self._settle(mode)

    def _try_out(self, new: BackendInstance, node: NodeSettings, tell: Tell) -> None:
        """Program everything, see that it is there, and send a connection through it."""
        loop = self._loop

        def program() -> list[Update]:
            loop.hold()
            updates = loop.updates(node)
            for update in updates:
                for key, problem in _sync(new, update).unserved.items():
                    raise NotProven(f"{new.mode}: {key} would not be served: {problem}")
            return updates

        updates = loop.call(program)
        tell(f"programmed {max(len(update.plans) for update in updates)} service ports")
        prove(loop, new, updates, tell)

    def _roll_back(self, new: BackendInstance) -> None:
        """Have the old mode make everything right again; then what the new one made retires."""
        old = self.instance
        terms = self._terms(old.mode)

        def restore() -> None:
            try:
                for update in self._loop.updates(terms.node):
                    _sync(old, update)
            finally:  # what could not be restored now is tried again and again
                self._loop.serve_with(old, terms.node, terms.pacing, Scope.RESYNC)

        try:
            self._loop.call(restore)
        except Exception as error:  # noqa: BLE001 - what the new mode has in the kernel may be all there is
            log.error("the switch can't be rolled back now; what it left goes at the next start", extra={
                "fields": {"mode": old.mode, "tried": new.mode, "error": repr(error)}})
            self._registry.close_backend(new)
            return
        self._retiring.add(new.mode, new)
        self._settle(old.mode)
        log.warning("the switch was rolled back", extra={"fields": {"mode": old.mode, "tried": new.mode}})

    def _settle(self, mode: str) -> None:
        """*mode* serves, alone. The journal is needed only if the configuration says something else."""
        if mode == self.configured:
            self._journal.forget()
        else:
            self._journal.write(Entry(self.configured, mode, mode, Phase.SERVING))

    def _usable(self, mode: str) -> None:
        detection = self._registry.detect(mode, self._terms(mode).settings)
        if not detection.usable:
            raise SwitchFailed(_does_not_work(mode, detection.because))

    def _caveats(self, mode: str) -> list[Caveat]:
        terms = self._terms(mode)

        def ask() -> list[Caveat]:
            found = [self._registry.caveats(mode, update, terms.settings)
                     for update in self._loop.updates(terms.node)]
            return list(dict.fromkeys(caveat for caveats in found for caveat in caveats))

        return self._loop.call(ask)


def _does_not_work(mode: str, because: str) -> str:
    return f"{mode} does not work here: {because}"


def _sync(instance: BackendInstance, update: Update) -> SyncReport:
    """Sync, and again if that fails: somebody else may hold a lock. Raises SyncFailed."""
    for _ in range(_TRIES - 1):
        try:
            return instance.sync(update)
        except SyncFailed:
            time.sleep(_PAUSE)
    return instance.sync(update)


@contextmanager
def _failures() -> Iterator[None]:
    """What is known to go wrong is a SwitchFailed; anything else is a plugin's mistake and said to be one."""
    try:
        yield
    except SwitchFailed:
        raise
    except (BackendError, JournalFailed, NotProven) as error:
        raise SwitchFailed(str(error)) from error
    except Exception as error:
        log.exception("a switch of modes went wrong")
        raise SwitchFailed(repr(error)) from error
