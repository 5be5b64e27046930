"""The mode that the configuration file and a label of the Node ask for, followed while the proxy runs.

The label comes first. Each change of either is tried once: what does not work is reported, and another try
takes another change, `kproxy switch`, or a restart.
"""

import logging
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from kproxy_core.config.file import ConfigError
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.values import Fallback
from kproxy_core.model.node import NodeObject
from kproxy_core.modes.choice import Conclusion
from kproxy_core.modes.journal import Reason
from kproxy_core.modes.switch import ModeSwitch, ReportProgress, SwitchFailed
from kproxy_core.observe.events import EventRecorder
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.sync.observer import SyncObserver

log = logging.getLogger("kproxy.run")

_CONFIGURATION = "configuration"


class Step(NamedTuple):
    """A switch to make."""

    mode: str
    """"": the one that a start would choose."""
    reason: Reason


def after_label(label: str | None, modes: Collection[str], reason: Reason) -> Step | None:
    """Return what a changed *label* asks for; None: nothing. *reason*: the one of the mode that serves.

    A label that is gone (None) only takes back a mode that a label has named.
    """
    if label is None:
        return Step("", Reason.CONFIGURATION) if reason is Reason.LABEL else None
    return Step(label, Reason.LABEL) if label in modes else None


def after_file(configured: str, label: str | None, serving: str) -> Step:
    """Return what a file that names another mode asks for. A label that did not work is no obstacle."""
    return Step(serving, Reason.LABEL) if label == serving else Step(configured, Reason.CONFIGURATION)


class NodeLabel(SyncObserver):
    """Calls *changed* on the loop's thread with the first and each new value of a label; None: it is gone."""

    def __init__(self, key: str, changed: Callable[[str | None], None]) -> None:
        self._key = key
        self._changed = changed
        self._seen: str | UnsetType | None = UNSET

    def node_seen(self, node: NodeObject) -> None:
        label = node.labels.get(self._key)
        if label != self._seen:
            self._seen = label
            self._changed(label)


class DesiredMode:
    """Switches to the mode that is asked for. A thread exists only while there is something to do."""

    def __init__(
        self, switch: ModeSwitch, events: EventRecorder, health: ProxyHealth, *, key: str,
        modes: Collection[str], conclude: Callable[[str], Conclusion], fell_back: Callable[[Fallback], None],
    ) -> None:
        """*key*: the label's; "": none is followed. *modes*: the installed ones.

        *conclude* returns the mode in which a start with a configured one would serve. It raises as
        `choice.conclude`. *fell_back* is called once another mode serves than the one that is configured.
        """
        self._switch = switch
        self._events = events
        self._health = health
        self._key = key
        self._by_label = f"label {key}"
        self._modes = modes
        self._conclude = conclude
        self._fell_back = fell_back
        self._lock = threading.Lock()
        self._label: str | None = None
        """The value of the label; None: the Node has none, or is not known yet."""
        self._new_label = False
        self._new_file: str | None = None
        """The mode in the file, if that has changed."""
        self._failed: dict[str, str] = {}
        """The modes whose failures are shown, by what names them."""
        self._started = self._closed = False
        self._thread: threading.Thread | None = None

    def set_label(self, label: str | None) -> None:
        """Follow the label, whose value is *label* now; None: it is gone."""
        with self._lock:
            self._label, self._new_label = label, True
            self._wake()

    def configure(self, mode: str) -> None:
        """Follow the file, which names *mode* now."""
        with self._lock:
            self._new_file = mode
            self._wake()

    def start(self) -> None:
        """Begin to follow: a mode serves and is in sync."""
        with self._lock:
            self._started = True
            self._wake()

    def close(self) -> None:
        """Follow nothing more. Waits for a switch under way, which ends with the loop."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def switch_by_hand(self, mode: str, report_progress: ReportProgress) -> None:
        """Switch to *mode* unless the label names another one. Raises SwitchFailed."""
        with self._switch.alone():
            self.permit(mode)
            reason = Reason.LABEL if self._label == mode else Reason.SWITCH
            self._switch.switch_to(mode, report_progress, reason=reason)
            self._forget(*[named_by for named_by, failed in self._failed.items() if failed == mode])

    def permit(self, mode: str) -> None:
        """Raise SwitchFailed if the label names another mode than *mode*: then no one switches by hand."""
        label = self._label
        if label != mode and label in self._modes:
            raise SwitchFailed(
                f"the label {self._key} of this Node names mode {label}: change or remove the label")

    @property
    def named_by(self) -> str:
        """The key of the label that names the serving mode; "": none does."""
        return self._key if self._switch.reason is Reason.LABEL else ""

    def _wake(self) -> None:
        """Start the thread if it is needed. The lock is held."""
        if self._thread is None and self._started and not self._closed and self._has_news():
            self._thread = threading.Thread(target=self._run, name="kproxy-mode", daemon=True)
            self._thread.start()

    def _has_news(self) -> bool:
        return self._new_label or self._new_file is not None

    def _run(self) -> None:
        while True:
            with self._switch.alone(wait=True):
                with self._lock:
                    if self._closed or not self._has_news():
                        self._thread = None
                        return
                    label = self._label
                    configured = None
                    if self._new_label:
                        self._new_label = False
                    else:
                        configured, self._new_file = self._new_file, None
                if configured is None:
                    self._follow_label(label)
                else:
                    self._follow_file(configured, label)

    def _follow_label(self, label: str | None) -> None:
        self._forget(self._by_label, _CONFIGURATION)
        step = after_label(label, self._modes, self._switch.reason)
        if step is not None and step.mode:
            self._try(step, self._by_label)
        elif step is not None:
            self._return_to(self._switch.configured)
        elif label is not None:
            # Its text is not repeated anywhere: not every author of a label may speak to operators.
            problem = f"names none of the installed modes, {', '.join(self._modes)}"
            log.error("the %s %s", self._by_label, problem)
            self._show(self._by_label, "", problem)

    def _return_to(self, configured: str) -> None:
        """Serve in the mode that a start would choose, now that the label is gone."""
        try:
            mode, fallback = (configured, None) if configured == self._switch.instance.mode else (
                self._conclude(configured))
        except (BackendError, ConfigError) as error:
            self._fail(_CONFIGURATION, configured, str(error))
            return
        if self._try(Step(mode, Reason.CONFIGURATION), _CONFIGURATION) and fallback is not None:
            self._fell_back(fallback)

    def _follow_file(self, configured: str, label: str | None) -> None:
        self._forget(_CONFIGURATION)
        self._try(after_file(configured, label, self._switch.instance.mode), _CONFIGURATION, configured)

    def _try(self, step: Step, named_by: str, configured: str | None = None) -> bool:
        """Make *step*. Return whether it worked."""
        try:
            self._switch.switch_to(step.mode, _log_progress, reason=step.reason, configured=configured)
        except SwitchFailed as error:
            self._fail(named_by, step.mode, str(error))
            return False
        return True

    def _fail(self, named_by: str, mode: str, error: str) -> None:
        log.error("could not switch to the mode in the %s", named_by, extra={
            "fields": {"mode": mode, "error": error}})
        self._show(named_by, mode, f"could not switch to {mode or 'any mode'}: {error}")

    def _show(self, named_by: str, mode: str, problem: str) -> None:
        """Show in /healthz and in an event why *mode* does not serve."""
        self._failed[named_by] = mode
        self._health.report(named_by, None, problem)
        self._events.report_node("Warning", "ModeSwitchFailed", f"{named_by}: {problem}")

    def _forget(self, *names: str) -> None:
        for named_by in names:
            self._failed.pop(named_by, None)
            self._health.report(named_by, None, "")


def _log_progress(line: str) -> None:
    log.info("mode switch", extra={"fields": {"step": line}})
