"""What systemd is told about this process: sd_notify(3), sd_watchdog_enabled(3)."""

import logging
import os
import socket
import threading
from collections.abc import Callable, MutableMapping
from typing import Final

log = logging.getLogger("kproxy.run")

_INTERVAL: Final = 10.0
"""Seconds between messages, at most: how old the text in ``systemctl status`` may be."""


class ServiceManager:
    """The socket on which systemd receives messages. Messages are dropped if there is none."""

    def __init__(self, address: str = "", watchdog: float | None = None) -> None:
        """*watchdog*: seconds after which a process that sends no `WATCHDOG=1` is ended; None: never."""
        self.address = address
        self.watchdog = watchdog
        self._failed = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> "ServiceManager":
        """Read and delete systemd's variables: child processes must not speak for this process."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", "")
        enabled = microseconds.isdecimal() and int(microseconds) > 0 and watched in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1_000_000 if enabled else None)

    def send(self, *assignments: str) -> None:
        """Send *assignments*, such as ``READY=1``. Never waits; a failure is logged once."""
        if not self.address:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        message = "\n".join(" ".join(assignment.split()) for assignment in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), name)
        except OSError as error:
            if not self._failed:
                log.warning("cannot notify systemd",
                            extra={"fields": {"socket": self.address, "error": error.strerror or str(error)}})
            self._failed = True


class Heartbeat:
    """Reports the state of the loop to systemd, from the loop's thread, so that a stuck loop is silent.

    Each message is complete, so that a lost one does no harm.
    """

    def __init__(
        self, manager: ServiceManager, post: Callable[[Callable[[], None]], None], *,
        prepare: Callable[[], object], status: Callable[[], str], alive: Callable[[], bool],
    ) -> None:
        """*post* has a function called on the loop's thread, where *status* and *alive* are called.

        *prepare* is called before each message on a thread of its own, for what may take long. *status*: the
        text of ``systemctl status``. *alive*: what ``/livez`` answers.
        """
        self._manager = manager
        self._post = post
        self._prepare = prepare
        self._status = status
        self._alive = alive
        self._ready = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kproxy-systemd", daemon=True)

    @property
    def interval(self) -> float:
        """Seconds between two messages: at most half of the watchdog's."""
        watchdog = self._manager.watchdog
        return _INTERVAL if watchdog is None else min(_INTERVAL, watchdog / 2)

    def start(self) -> None:
        """Begin to report. Does nothing if this process is no service of systemd."""
        if self._manager.address:
            self._thread.start()

    def set_ready(self) -> None:
        """Report that every family has synced, now and from now on. For the loop's thread."""
        self._ready = True
        self.beat()

    def beat(self) -> None:
        """Send one message. For the loop's thread."""
        if not self._manager.address or self._stopped.is_set():
            return
        assignments = [f"STATUS={self._status()}"]
        if self._ready:
            assignments.append("READY=1")
        if self._manager.watchdog is not None and self._alive():
            assignments.append("WATCHDOG=1")
        self._manager.send(*assignments)

    def stop(self) -> None:
        """Report that this process is ending."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._manager.send("STOPPING=1", "STATUS=stopping")

    def _run(self) -> None:
        while True:
            self._prepare()
            self._post(self.beat)
            if self._stopped.wait(self.interval):
                return
