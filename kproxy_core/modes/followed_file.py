"""The configuration file, watched while the proxy runs: it may ask for another mode."""

import logging
from collections.abc import Callable
from functools import partial

from kproxy_core.config.file import ConfigError, load
from kproxy_core.linux.files import FileWatch
from kproxy_core.modes.settings import Configuration
from kproxy_core.modes.switch import ModeSwitch, SwitchFailed
from kproxy_core.observe.events import EventRecorder

log = logging.getLogger("kproxy.run")


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
