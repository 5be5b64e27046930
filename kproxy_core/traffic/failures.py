"""Failed connections of Services: reported by connection tracking, added to the totals."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kproxy_core.backend.api import Failure
from kproxy_core.host.conntrack.failures import Ended, ResetWatch, read_unanswered
from kproxy_core.host.conntrack.volumes import Volumes
from kproxy_core.host.errors import HostError
from kproxy_core.model.address import Family
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend

log = logging.getLogger("kproxy.run")

_SYN_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent")
_USUAL_SYN_TIMEOUT = 120

Report = Callable[[Family, Frontend, Destination, Failure], None]


class Failures:
    """Reports each failed connection once, through *report*, which any thread may call."""

    def __init__(self, families: Sequence[Family], report: Report) -> None:
        self._families = families
        self._report = report
        self._unanswered: dict[Family, frozenset[bytes]] = {}
        """Reported connections that the table still holds."""
        self._lock = threading.Lock()
        self._watch: ResetWatch | None = None
        self.lost = 0
        """Times that the kernel dropped events because they were not read fast enough."""

    def start(self, add_volumes: Callable[[Volumes], None] | None) -> None:
        """Start following events. Without them, which is logged, only unanswered connections are reported.

        *add_volumes*: see `ResetWatch`.
        """
        try:
            self._watch = ResetWatch(self._ended, add_volumes)
        except HostError as error:
            log.warning("refused and reset connections are not counted", extra={
                "fields": {"error": str(error)}})

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def read(self) -> None:
        timeout = _syn_timeout()
        for family in self._families:
            try:
                found = read_unanswered(family, timeout)
            except HostError as error:
                log.debug("cannot read unanswered connections", extra={"fields": {"error": str(error)}})
                continue
            with self._lock:
                known = self._unanswered.get(family, frozenset())
                self._unanswered[family] = frozenset(one.id for one in found)
            for one in found:
                if one.id not in known:
                    self._report(family, one.dialled, one.endpoint, Failure.UNANSWERED)

    def _ended(self, found: Sequence[Ended], lost: bool) -> None:
        self.lost += lost
        for one in found:
            failure = Failure.RESET if one.established else Failure.REFUSED
            self._report(one.family, one.dialled, one.endpoint, failure)


def _syn_timeout() -> int:
    try:
        return int(_SYN_TIMEOUT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _USUAL_SYN_TIMEOUT
