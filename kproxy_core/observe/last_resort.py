"""Log lines and cluster events about Services that use their last resort."""

import logging
from collections.abc import Callable, Sequence

from kproxy_core.model.address import Family
from kproxy_core.model.service import ServiceName
from kproxy_core.plan.last_resort import LastResortStep
from kproxy_core.sync.observer import Synced, SyncObserver

log = logging.getLogger("kproxy.run")

_NAMED = 20
"""Limit for the Services named in a log line."""
_REPORTED = 5
"""Limit for the Services with events in one sync: all nodes send them to an API server that just started."""


class LastResortReports(SyncObserver):
    """Tells when Services begin to use their last resort, and when that ends."""

    def __init__(self, report: Callable[[ServiceName, str], None]) -> None:
        """*report* sends an event about a Service, with a note."""
        self._report = report

    def sync_succeeded(self, synced: Synced) -> None:
        steps, family = synced.follow_ups.last_resorts, synced.family
        if not steps:
            return
        begun = [step for step in steps if step.begins]
        over = [step for step in steps if step.is_over]
        ended = [step for step in steps if step.after is None and not step.is_over]
        _log(logging.WARNING, "no endpoint is ready, using those that were ready last", family, begun)
        _log(logging.WARNING, "last resort is over, and no endpoint is ready", family, over)
        _log(logging.INFO, "last resort has ended", family, ended)
        for step in begun[:_REPORTED]:
            if resort := step.after:
                self._report(step.service, (
                    f"no endpoint is ready; using the {len(resort.endpoints)} that were ready last, "
                    f"for {resort.until - resort.since:.0f} s"))
        for step in over[:_REPORTED]:
            self._report(step.service, "last resort is over, and no endpoint is ready")


def _log(level: int, message: str, family: Family, steps: Sequence[LastResortStep]) -> None:
    if steps:
        names = [str(step.service) for step in steps[:_NAMED]]
        log.log(level, message, extra={
            "fields": {"ip_family": family.label, "services": len(steps), "names": names}})
