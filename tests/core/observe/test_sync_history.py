"""What people see of syncs: the last ones, and a log line for each that changed something."""

import logging

import pytest

from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import Scope, SyncReport
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import ServicePortKey
from kproxy_core.observe.history import ChangeLog, SyncHistory
from kproxy_core.sync.difference import Step
from kproxy_core.sync.observer import Synced, SyncFailure
from kproxy_core.sync.plans import FamilyPlans


def synced(changed: int, **fields: object) -> Synced:
    steps = [Step(ServicePortKey("default", f"web{n}", "", Protocol.TCP), None, None) for n in range(changed)]
    plans = FamilyPlans(Family.IPV4, Store((Family.IPV4,), (), 0.0))
    return Synced(plans=plans, instance=None, scope=Scope.CHANGED, seconds=0.25, steps=steps,  # type: ignore[arg-type]
                  report=SyncReport(7), **fields)  # type: ignore[arg-type]


def test_the_last_syncs_are_kept_with_their_first_names() -> None:
    history = SyncHistory(lambda: 100.0)
    for _ in range(200):
        history.sync_succeeded(synced(8))
    failure = SyncFailure(family=Family.IPV4, scope=Scope.RESYNC, seconds=1, error=SyncFailed("no"))
    history.sync_failed(failure)
    assert len(history.records) == 120
    first, last = history.records[0], history.records[-1]
    assert (first.at, first.operations, first.changed, first.problem) == (100.0, 7, 8, "")
    assert first.names == tuple(f"default/web{n}" for n in range(5))
    assert (last.scope, last.problem) == ("full", "no")


def test_each_change_has_a_log_line_that_names_its_service_ports(caplog: pytest.LogCaptureFixture) -> None:
    changes = ChangeLog(lambda: 102.5)
    with caplog.at_level(logging.DEBUG, "kproxy.run"):
        logging.getLogger("kproxy").propagate = True
        changes.sync_succeeded(synced(0))
        changes.sync_succeeded(synced(30, trigger_times=[100.0, 101.0]))
    (record,) = [record for record in caplog.records if record.getMessage() == "programmed"]
    fields = record.__dict__["fields"]
    assert (fields["sync"], fields["changed"], fields["since_change"]) == (1, 30, 2.5)
    assert fields["names"] == [f"default/web{n}" for n in range(20)]
