"""The configuration file, watched while the proxy runs: it may ask for another mode."""

from collections.abc import Callable
from functools import partial

from kproxy_core.config.file import ConfigError, load
from kproxy_core.linux.files import FileWatch
from kproxy_core.modes.desired import DesiredMode
from kproxy_core.modes.settings import Configuration
from kproxy_core.modes.switch import ModeSwitch


class FollowedFile:
    """The watched configuration file. A change of only the mode can be followed without a restart."""

    def __init__(
        self, configuration: Configuration, switch: ModeSwitch, desired: DesiredMode,
        restart: Callable[[], None],
    ) -> None:
        """Start watching. *restart* is called once if a change needs a restart."""
        self._configuration = configuration
        self._switch = switch
        self._desired = desired
        self._restart = restart
        file = configuration.file
        self._watch = FileWatch(
            file.path, file.content, partial(self._changed, file.path)) if file is not None else None

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _changed(self, path: str) -> bytes | None:
        """Follow the mode if nothing else changed. Return the file's content; None if a restart is needed."""
        known = self._configuration
        with self._switch.alone(wait=True):  # its end decides which mode's options may not have changed
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
        self._desired.configure(asked)
        return file.content
