"""Stale UDP flows are deleted on a thread of their own: walking the kernel's table takes 10 ms or more."""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from kproxy_core.host.conntrack.flows import delete_stale_udp
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_core.plan.stale_flows import StaleFlows

log = logging.getLogger("kproxy.run")


class Cleaned(NamedTuple):
    """How deleting went."""

    family: Family
    stale: StaleFlows
    deleted: int | None
    """None: it failed, and is to be tried again."""
    seconds: float


class Cleaner(Protocol):
    """Deletes stale flows and tells when it has."""

    def clean(self, family: Family, stale: StaleFlows) -> None:
        """Begin deleting the flows of *family* that are *stale*; returns at once."""


class NoCleaner:
    """For a process that may not delete any."""

    def clean(self, family: Family, stale: StaleFlows) -> None:
        """Leave them."""


class FlowCleaner:
    """Deletes what it is given, one after the other. The thread starts with the first flows."""

    def __init__(self, done: Callable[[Cleaned], None]) -> None:
        """*done* is called from the thread."""
        self._done = done
        self._due: SimpleQueue[tuple[Family, StaleFlows]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def clean(self, family: Family, stale: StaleFlows) -> None:
        """See `Cleaner.clean`."""
        self._due.put((family, stale))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kproxy-flows", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            family, stale = self._due.get()
            started = time.monotonic()
            deleted: int | None = None
            try:
                deleted = delete_stale_udp(family, stale)
            except (HostError, OSError) as error:
                log.warning("stale UDP flows are left", extra={
                    "fields": {"ip_family": family.label, "error": str(error)}
                })
            self._done(Cleaned(family, stale, deleted, time.monotonic() - started))
