"""Changes of the mode while the process runs: by the control socket or the configuration file."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kproxy_core.backend.errors import BackendError
from kproxy_core.config.file import ConfigError, load
from kproxy_core.explain.errors import NoAnswer
from kproxy_core.host.files.file_watch import FileWatch
from kproxy_core.modes.control import Handler, ReportProgress, RequestRefused
from kproxy_core.modes.switch import ModeSwitch, SwitchFailed
from kproxy_core.observe.events.recorder import EventRecorder
from kproxy_core.process.terms import Configuration

if TYPE_CHECKING:
    from kproxy_core.process.inspection.running import Inspection
    from kproxy_core.process.overview import Overview

log = logging.getLogger("kproxy.run")


def answer_requests(
    switch: ModeSwitch, inspection: Callable[[], "Inspection"], overview: Callable[[], "Overview"],
) -> Handler:
    """Return the handler of the control socket's requests."""

    def answer(request: Mapping[str, Any], report_progress: ReportProgress) -> Mapping[str, Any]:
        try:
            match request:
                case {"do": "switch", "mode": str(mode)}:
                    switch.switch_to(mode, report_progress)
                    return {"mode": switch.instance.mode, "configured": switch.configured}
                case {"do": "top", "search": str(search), "sort": str(sort), "count": int(count)}:
                    return {"status": overview().status(), **overview().services(search, sort, count=count)}
            return inspection().answer(request)
        except (BackendError, NoAnswer, SwitchFailed) as error:
            raise RequestRefused(str(error)) from error

    return answer


class FollowedFile:
    """The watched configuration file. A change of only the mode can be followed without a restart."""

    def __init__(
        self, configuration: Configuration, switch: ModeSwitch, events: EventRecorder,
        restart: Callable[[], None],
    ) -> None:
        """Start watching. *restart* is called once if a change needs a restart."""
        self._configuration = configuration
        self._switch = switch
        self._events = events
        self._restart = restart
        file = configuration.file
        self._watch = FileWatch(
            file.path, file.content, partial(self._changed, file.path)) if file is not None else None

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _changed(self, path: str) -> bytes | None:
        """Switch modes if nothing else changed. Return the file's content; None if a restart is needed."""
        known = self._configuration
        serving = self._switch.instance.mode
        try:
            file = load(path)
            new = Configuration(known.flags, file)
            config, asked = new.of(serving), new.mode
            follows = asked and config.kproxy.live_mode_switch and config.is_like(known.of(serving))
        except ConfigError:  # the next start says what is wrong
            follows = False
        if not follows:
            self._restart()
            return None
        known.follow(file)
        try:
            self._switch.switch_to(asked, _log_progress, configured=asked)
        except SwitchFailed as error:
            log.error("could not switch to the mode in the configuration file", extra={
                "fields": {"mode": asked, "error": str(error)}})
            self._events.report_node("Warning", "ModeSwitchFailed", f"{asked}: {error}")
        return file.content


def _log_progress(line: str) -> None:
    log.info("mode switch", extra={"fields": {"step": line}})
