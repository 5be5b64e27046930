"""Requests of the control socket and of the page, each put to the part of the proxy that answers it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kproxy_core.app.errors import Misused, NoAnswer, RequestRefused
from kproxy_core.app.replies import replied
from kproxy_core.app.requests import (
    Answer,
    Compare,
    Diff,
    Explain,
    Plans,
    Report,
    Request,
    Status,
    Switch,
    Targets,
    Top,
    parse_texts,
)
from kproxy_core.contract.errors import BackendError
from kproxy_core.contract.registry import Registry, UnknownMode
from kproxy_core.modes.desired import DesiredMode
from kproxy_core.modes.switch import ModeSwitch, ReportProgress, SwitchFailed
from kproxy_core.observe import logs
from kproxy_core.observe.metrics import Metrics
from kproxy_core.observe.pages import About

if TYPE_CHECKING:
    from kproxy_core.app.answers import Answers
    from kproxy_core.app.overview import Overview

log = logging.getLogger("kproxy.run")


@dataclass(frozen=True)
class Dispatcher:
    """Answers requests. Every method may be called from any thread but the loop's."""

    registry: Registry
    switch: ModeSwitch
    desired: DesiredMode
    metrics: Metrics
    about: About
    _answers: "Callable[[], Answers]"
    """As `_overview`, made at the first request that needs it: a start does without what it imports."""
    _overview: "Callable[[], Overview]"

    def answer(self, request: Request, report_progress: ReportProgress) -> Answer:
        """Fulfil a request of the control socket or of the page. Raises RequestRefused."""
        try:
            match request:
                case Switch(mode=mode):
                    self.registry.check_mode(mode)
                    self.desired.switch_by_hand(mode, report_progress)
                    return {"mode": self.switch.instance.mode, "configured": self.switch.configured,
                            "label": self.desired.named_by}
                case Compare(mode=mode):
                    self.registry.check_mode(mode)
                    self.desired.permit(mode)
                    return self._answers().compare(request)
                case Explain():
                    return self._answers().explain(request)
                case Diff():
                    return self._answers().diff()
                case Targets():
                    return self._answers().targets(request)
                case Report():
                    return {**self._answers().report(), **self._own_report()}
                case Plans():
                    return self._answers().plans()
                case Status():
                    return replied(self._overview().condition())
                case Top():
                    return {"status": self._overview().status(), **self._overview().services(request)}
        except Misused:
            raise
        except UnknownMode as error:
            raise Misused(str(error)) from error
        except (BackendError, NoAnswer, SwitchFailed) as error:
            raise RequestRefused(str(error)) from error

    def answer_page(self, kind: type[Explain] | type[Top], given: Mapping[str, str]) -> Answer:
        """Answer the page's question with the fields *given*. A refusal is in ``problem``."""
        try:
            return self.answer(parse_texts(kind, given), log.debug)
        except RequestRefused as error:
            return {"problem": str(error)}

    def status(self) -> Mapping[str, Any]:
        """Return mode, health, problems and the last syncs, for the page."""
        return self._overview().status()

    def _own_report(self) -> Mapping[str, Any]:
        """Return the fields of a report about this process."""
        metrics, _ = self.metrics.exposition()
        return {
            "configuration": self.about.configuration, "metrics": metrics.decode().splitlines(),
            "log": logs.recent_lines(),
        }  # fmt: skip
