"""The switch of a running node from one mode to another without breaking a connection: start, proof,
change.
"""

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kproxy_core.config.file import ConfigError
from kproxy_core.contract.calls import BackendInstance
from kproxy_core.contract.errors import BackendError, InvalidOption, PluginFailed, SyncFailed, Unsupported
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, Caveat, Leftovers, Scope, SyncReport, Update
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Address, Protocol, format_address, format_socket
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.modes.journal import Entry, Journal, JournalFailed, Phase, Reason
from kproxy_core.modes.retirement import RetiringModes, report
from kproxy_core.modes.settings import ModeSettings
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.node_facts import NodeSettings

# The start of a backend: it is made and checked before anything depends on it.

log = logging.getLogger("kproxy.run")

ReportProgress = Callable[[str], None]


def start_backend(
    registry: Registry, mode: str, settings: BackendSettings, *, insist: bool = False
) -> BackendInstance:
    """Make the backend of *mode*, and check that it can work as far as possible without programming rules.

    With *insist*, a requirement that seems to be missing is only logged; what the backend itself finds
    missing is not. Raises UnknownMode, PluginRefused, InvalidOption or
    Unsupported.
    """
    try:
        instance = registry.make_backend(mode, settings)
    except PluginFailed as error:
        raise Unsupported(str(error)) from error
    try:
        if not _can_begin(instance):
            detection = registry.detect(mode, settings, load_modules=True)
            if detection.refuted and insist:
                fields = {"mode": mode, "because": detection.because}
                log.warning("mode may not work", extra={"fields": fields})
            elif detection.refuted:
                raise Unsupported(detection.because)
    except SyncFailed as error:
        # It may pass, and the sync loop retries.
        log.info("backend start failed, retrying", extra={"fields": {"mode": mode, "error": str(error)}})
    except (InvalidOption, Unsupported):
        instance.close()
        raise
    return instance


def _can_begin(instance: BackendInstance) -> bool:
    """Return whether the backend has found that it can work. A plugin that fails cannot."""
    try:
        return instance.begin()
    except (HostError, PluginFailed) as error:
        raise Unsupported(str(error)) from error


# Proof that a mode is at work, before anything of another mode is removed.

_TRIES = 3
"""Other processes may change the rules in between."""

_KEY = ServicePortKey("kproxy", "mode-switch", "probe", Protocol.TCP)

_ATTEMPTS = 3
_PATIENCE = 1.0
"""Seconds for one attempt."""


class ProofFailed(Exception):
    """The kernel's objects are not ours, or a connection failed; one line says which."""


class _ProbeImpossible(Exception):
    """No VIP to connect to, or no route to it."""


def prove(
    loop: Loop, instance: BackendInstance, updates: Sequence[Update], report_progress: ReportProgress
) -> None:
    """Check that the kernel holds *updates*, and send a connection through *instance* in each family.

    A second full sync that writes nothing proves the first. The loop must be on hold. Raises ProofFailed, or
    whatever the backend raises.
    """
    for _ in range(_TRIES):
        if not sum(loop.call(partial(loop.update, instance, update)).operations for update in updates):
            break
    else:
        raise ProofFailed(f"{instance.mode}: the kernel does not hold what was programmed")
    report_progress("read back: complete")
    addresses = loop.call(lambda: loop.addresses)
    for update in updates:
        try:
            report_progress(f"{update.family.label}: {_probe(loop, instance, update, addresses)} answered")
        except _ProbeImpossible as reason:
            report_progress(f"{update.family.label}: not probed: {reason}")


def _probe(loop: Loop, instance: BackendInstance, full: Update, addresses: frozenset[Address]) -> str:
    """Connect through a service port that only *instance* knows: an unused port of a ClusterIP in *full*.

    Its endpoint is in this process. *addresses* are this machine's. Returns the VIP and the port. Raises
    ProofFailed, _ProbeImpossible, or whatever the backend raises.
    """
    vip = next((p.cluster_ip for p in full.plans.values() if p.cluster_ip is not None), None)
    if vip is None:
        raise _ProbeImpossible("there is no Service with a ClusterIP")
    own = full.node.node_ip
    if own is None or own not in addresses:
        raise _ProbeImpossible("the node's address is not on this machine")
    with socket.create_server((format_address(own), 0), family=full.family.af) as listener:
        port = listener.getsockname()[1]
        name = format_socket(vip, port)
        if any(p.cluster_ip == vip and p.port == port for p in full.plans.values()):
            raise _ProbeImpossible(f"{name} belongs to a Service")
        plan = ServicePlan(
            key=_KEY, family=full.family, created="", port=port, cluster_ip=vip,
            cluster=(Destination(own, port),), hairpins=(own,), has_endpoints=True,
        )  # fmt: skip
        try:
            loop.call(partial(loop.update, instance, _update(full, plan)))
            problem = ""
            for _ in range(_ATTEMPTS):
                problem = _attempt(listener, vip, port)
                if not problem:
                    return name
            raise ProofFailed(f"{instance.mode}: {name} did not reach its endpoint: {problem}")
        finally:
            loop.call(partial(loop.update, instance, _update(full, None)))


def _update(full: Update, plan: ServicePlan | None) -> Update:
    """Return the update that adds the probe's service port; *plan* None: the one that removes it."""
    plans = full.plans if plan is None else {**full.plans, _KEY: plan}
    return Update(full.family, Scope.CHANGED, full.node, {_KEY: plan}, plans, addresses=full.addresses)


def _attempt(listener: socket.socket, vip: Address, port: int) -> str:
    """Connect to *vip*, and check that *listener* answers. Return the reason why it does not; "" if it does.

    Until an answer arrives, every connection to the listener is answered with the same word: also those of
    other processes, and that of a relay between both ends. Raises _ProbeImpossible without a route.
    """
    word = secrets.token_bytes(16)
    with socket.socket(listener.family) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect((format_address(vip), port))
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(listener, select.POLLIN)
            ends = time.monotonic() + _PATIENCE
            while (left := ends - time.monotonic()) > 0 and (ready := dict(poll.poll(left * 1000))):
                if connection.fileno() in ready:
                    return "" if connection.recv(len(word)) == word else "another process answered"
                with listener.accept()[0] as client:
                    client.sendall(word)
        except OSError as error:
            if "unreachable" in str(error):
                raise _ProbeImpossible(f"no route to {format_socket(vip, port)}") from error
            return str(error)
    return "timed out"


# The switch of a running node from one mode to another, without breaking a connection.
#
# ARCHITECTURE.md draws the steps. A failed one is rolled back. kube-proxy removes the old mode's rules
# before the new ones exist (1.36, cmd/kube-proxy/app/server_linux.go).

_PAUSE = 0.5
"""Seconds between two attempts."""


class SwitchFailed(Exception):
    """The old mode still serves; one line says why."""


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
        instance: BackendInstance, configured: str, mode_settings: Callable[[str], ModeSettings],
        mode_changed: Callable[[BackendInstance], None], reason: Reason = Reason.CONFIGURATION,
        pause: float = _PAUSE,
    ) -> None:
        """*instance* serves already, for *reason*. *configured* is the configuration's mode, "" for none.

        *mode_settings* raises what a wrong configuration raises. *mode_changed* is called after each switch.
        *pause*: seconds between two attempts to sync.
        """
        self._pause = pause
        self._loop = loop
        self._registry = registry
        self._retiring = retiring
        self._journal = journal
        self.configured = configured
        """The mode in the configuration; "": none."""
        self._mode_settings = mode_settings
        self._mode_changed = mode_changed
        self._busy = threading.RLock()
        self.instance = instance
        """The backend that serves."""
        self.reason = reason
        """The reason for which it does."""
        self.before = journal.mode_before(configured, instance.mode)
        """The mode that served before the last switch, also if an earlier process made that.

        "": none, or the configuration asked for the switch.
        """

    def compare(self, mode: str) -> Comparison:
        """Compare *mode* with the one that serves. Raises SwitchFailed if it cannot serve here."""
        with _failures():
            detection = self._registry.detect(mode, self._mode_settings(mode).backend)
            if not detection.usable:
                raise SwitchFailed(_does_not_work(mode, detection.because))
            before, after = self._caveats(self.instance.mode), self._caveats(mode)
        return Comparison(
            tuple(caveat for caveat in after if caveat not in before),
            tuple(caveat for caveat in before if caveat not in after),
        )

    @contextmanager
    def alone(self, *, wait: bool = False) -> Iterator[None]:
        """Have only this thread switch modes. Raises SwitchFailed if another one does, unless *wait*."""
        if not self._busy.acquire(blocking=wait):
            raise SwitchFailed("another switch is in progress")
        try:
            yield
        finally:
            self._busy.release()

    def switch_to(
        self, mode: str, report_progress: ReportProgress, *, reason: Reason = Reason.SWITCH,
        configured: str | None = None,
    ) -> None:
        """Switch to *mode*. *configured* is the configuration's new mode, if that has changed.

        Raises SwitchFailed if the old mode still serves.
        """
        with self.alone(), _failures():
            if configured is not None and configured != self.configured:
                self.configured = configured
                if self.reason is Reason.CONFIGURATION:
                    self.reason = Reason.SWITCH
            if mode == self.instance.mode:
                report_progress(f"{mode} already serves")
            elif not self._loop.settled:
                raise SwitchFailed(f"{self.instance.mode} is not in sync yet")
            else:
                self._switch(mode, report_progress, reason)
            if reason is Reason.CONFIGURATION:
                self.before = ""
            self._settle(mode, reason)

    def prove(self) -> None:
        """Prove that the serving mode's rules are in the kernel and work. Raises SwitchFailed."""
        with self._busy, _failures():
            settings, instance = self._mode_settings(self.instance.mode), self.instance
            try:
                self._loop.call(self._loop.hold)
                updates = self._loop.call(partial(self._loop.programmed, settings.node))
                prove(self._loop, instance, updates, log.debug)
            finally:
                self._loop.call(
                    lambda: self._loop.serve_with(instance, settings.node, settings.pacing, Scope.CHANGED))

    def _switch(self, mode: str, report_progress: ReportProgress, reason: Reason) -> None:
        settings, old = self._mode_settings(mode), self.instance
        try:
            new = start_backend(self._registry, mode, settings.backend)  # Programs that it tries may hang.
        except Unsupported as error:
            raise SwitchFailed(_does_not_work(mode, str(error))) from error
        report_progress(f"{mode} works here")
        try:
            self._journal.write(Entry(self.configured, old.mode, mode, Phase.TRYING, self.reason))
        except JournalFailed:
            new.close()
            raise
        if self._retiring.cancel(mode):  # The node may have changed to another variant of iptables.
            report(mode, self._registry.supersede(mode, dry_run=False))
        log.info("switching modes", extra={"fields": {"before": old.mode, "after": mode}})
        try:
            self._try_out(new, settings.node, report_progress)
            self._journal.write(Entry(self.configured, old.mode, mode, Phase.SERVING, reason))
        except Exception as error:
            report_progress(f"rolling back: {error}")
            self._roll_back(new)
            raise
        self._loop.call(lambda: self._loop.serve_with(new, settings.node, settings.pacing, Scope.CHANGED))
        self.instance, self.before = new, old.mode
        self._mode_changed(new)
        report_progress(f"{mode} serves")
        log.info("switched modes", extra={"fields": {"before": old.mode, "after": mode}})
        left = self._retiring.retire(old.mode, old)
        if old.mode in self._registry.layers(mode):
            report_progress(f"the rules of {old.mode} are kept: {mode} needs them")
        else:
            report_progress(_rest(left))

    def _try_out(self, new: BackendInstance, node: NodeSettings, report_progress: ReportProgress) -> None:
        """Program everything and prove it. Raises ProofFailed, or whatever the backend raises."""
        loop = self._loop

        def hold() -> list[Update]:
            loop.hold()
            return loop.updates(node)

        updates = loop.call(hold)
        for update in updates:
            synced = self._sync(new, update, must_be_whole=True)
            if synced.degraded:
                raise ProofFailed(f"{new.mode}: {synced.degraded}")
            for key, problem in synced.unserved.items():
                raise ProofFailed(f"{new.mode}: {key} would not be served: {problem}")
        report_progress(f"programmed {max(len(update.plans) for update in updates)} service ports")
        prove(loop, new, updates, report_progress)

    def _roll_back(self, new: BackendInstance) -> None:
        """Resync the old mode, then retire the new one."""
        old = self.instance
        settings = self._mode_settings(old.mode)

        try:
            try:
                for update in self._loop.call(partial(self._loop.programmed, settings.node)):
                    self._sync(old, update)
            finally:  # the loop retries whatever could not be restored now
                self._loop.call(
                    lambda: self._loop.serve_with(old, settings.node, settings.pacing, Scope.RESYNC))
        except Exception as error:  # noqa: BLE001 - the new mode's rules may be the only ones
            log.error("could not roll back the switch; the next start removes its leftovers", extra={
                "fields": {"mode": old.mode, "tried": new.mode, "error": repr(error)}})
            new.close()
            return
        self._retiring.retire(new.mode, new)
        self._settle(old.mode, self.reason)
        log.warning("rolled back the switch", extra={"fields": {"mode": old.mode, "tried": new.mode}})

    def _sync(self, instance: BackendInstance, update: Update, *, must_be_whole: bool = False) -> SyncReport:
        """Sync, in all parts, and retry a failure: another process may hold a lock, or be late.

        Raises SyncFailed. *must_be_whole*: to serve less than everything is a failure, too.
        """
        for _ in range(_TRIES - 1):
            with suppress(SyncFailed):
                report = self._sync_parts(instance, update)
                if not must_be_whole or not (report.degraded or report.unserved):
                    return report
            time.sleep(self._pause)  # Not on the loop's thread, which answers requests meanwhile.
        return self._sync_parts(instance, update)

    def _sync_parts(self, instance: BackendInstance, update: Update) -> SyncReport:
        """Sync until all parts are written, and return the first report. Raises SyncFailed.

        The loop answers requests between two parts.
        """
        report = part = self._loop.call(partial(self._loop.update, instance, update))
        while part.unfinished:
            changed = {key: update.plans.get(key) for key in part.unfinished}
            rest = replace(update, scope=Scope.CHANGED, changed=changed)
            part = self._loop.call(partial(self._loop.update, instance, rest))
        return report

    def _settle(self, mode: str, reason: Reason) -> None:
        """Delete the journal's entry only if a start chooses *mode*, which serves, and none served before."""
        self.reason = reason
        if (mode == self.configured or reason is Reason.CONFIGURATION) and not self.before:
            self._journal.clear()
        else:
            self._journal.write(Entry(self.configured, self.before or mode, mode, Phase.SERVING, reason))

    def _caveats(self, mode: str) -> list[Caveat]:
        settings = self._mode_settings(mode)

        def ask() -> list[Caveat]:
            found = [self._registry.caveats(mode, update, settings.backend)
                     for update in self._loop.updates(settings.node)]
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


@contextmanager
def _failures() -> Iterator[None]:
    """Turn every failure into a SwitchFailed, and log those that only a bug explains."""
    try:
        yield
    except SwitchFailed:
        raise
    except (BackendError, ConfigError, JournalFailed, ProofFailed) as error:
        raise SwitchFailed(str(error)) from error
    except CancelledError as error:
        raise SwitchFailed("kproxy is stopping") from error
    except Exception as error:
        log.exception("mode switch failed unexpectedly")
        raise SwitchFailed(repr(error)) from error
