"""The running proxy at a glance, for `kproxy top` and the page: its state, and traffic by service port."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from kproxy_core.app.replies import Healthz, ProxyStatus
from kproxy_core.app.requests import Sort, Top
from kproxy_core.config.release import commit
from kproxy_core.contract.values import Failure
from kproxy_core.kube.forward import NAMESPACE as FORWARDS
from kproxy_core.model.address import format_socket
from kproxy_core.model.events import BadObject
from kproxy_core.model.service import ServicePortKey
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.history import SyncHistory
from kproxy_core.observe.pages import About
from kproxy_core.observe.traffic.recorder import TrafficRecorder
from kproxy_core.observe.traffic.totals import EndpointTotal, Total
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.sync.loop import Loop
from kproxy_core.sync.plans import FamilyPlans

_AT_ONCE = 50
"""Service ports that the loop's thread describes in one call."""
_MOST_ENDPOINTS = 50
"""Most endpoints of a service port in an answer."""

_VALUES: Mapping[Sort, Callable[[Total], float]] = {
    "connections": lambda total: total.forwarded + total.rejected,
    "rate": lambda total: total.rate,
    "rejected": lambda total: total.rejected,
    "failed": lambda total: total.failures,
    "bytes": lambda total: total.volume.bytes_to_endpoint + total.volume.bytes_from_endpoint,
}
"""What service ports are sorted by, if not by their names; the largest value is first."""

_NONE = Total()


class Overview:
    """Reads the running proxy and changes nothing. Not for the loop's thread, which it asks."""

    def __init__(
        self, loop: Loop, health: ProxyHealth, bad_objects: Callable[[], Iterable[BadObject]], about: About,
        history: SyncHistory | None,
        traffic: TrafficRecorder | None, node: str, modes: Callable[[], Mapping[str, str]],
    ) -> None:
        """*modes* returns ``configured``, the mode in the configuration, ``before``, the one that served
        before the last switch, and ``label``, the key of the Node's label that names what serves; "": none.
        """
        self._loop = loop
        self._health = health
        self._bad_objects = bad_objects
        self._about = about
        self._history = history
        self._traffic = traffic
        self._node = node
        self._modes = modes

    def status(self) -> dict[str, Any]:
        """Return mode, health, problems and the last syncs."""
        health = json.loads(self._health.healthz().body)
        problems = health.get("problems", ())
        return {
            "node": self._node, "mode": self._about.mode, "version": self._about.version,
            "uptime": time.time() - self._about.started, "now": time.time(),
            "healthy": bool(health["healthy"]), "well": not problems,
            "eligible": bool(health.get("nodeEligible", True)),
            "problems": problems, "counted": self._traffic is not None,
            "syncs": [record._asdict() for record in self._history.records] if self._history else [],
        }  # fmt: skip

    def condition(self) -> ProxyStatus:
        """Return whether the proxy is well, and what tells so. Does not need the loop."""
        condition = self._health.condition()
        healthz = self._health.healthz(condition.problems)
        return ProxyStatus(
            node=self._node, mode=self._about.mode, **self._modes(), version=self._about.version,
            commit=commit(), now=time.time(), started=self._about.started, well=condition.is_well,
            since=condition.since, problems=condition.problems,
            fallback=str(self._about.fallback_to(self._about.mode) or ""), last_sync=condition.last_sync,
            lag=round(condition.lag, 3), foreign_changes=condition.foreign_changes,
            healthz=Healthz(healthz.status, json.loads(healthz.body)))

    def services(self, asked: Top) -> dict[str, Any]:
        """Return the service ports that *asked* means, with their traffic, and how many there are."""
        totals = self._traffic.read() if self._traffic is not None else {}
        plans = self._loop.call(lambda: list(self._loop.plans.values()))
        keys: set[ServicePortKey] = set()
        for family in plans:
            keys |= self._loop.call(partial(set, family.plans))
        words = asked.search.lower().split()
        found = sorted(key for key in keys if all(word in str(key) for word in words))
        value = _VALUES.get(asked.sort)
        if value is not None:
            found.sort(key=lambda key: value(totals.get(key, _NONE)), reverse=True)
        wanted = found[asked.start:asked.start + asked.count]
        rows = [
            row for at in range(0, len(wanted), _AT_ONCE)
            for row in self._loop.call(partial(_describe, plans, wanted[at:at + _AT_ONCE], self._loop.now))
        ]
        now = time.monotonic()
        bad: dict[str, list[str]] = {}
        for each in self._bad_objects():
            service = f"{FORWARDS}/{each.name}" if each.kind == "Forward" else each.name
            bad.setdefault(service, []).append(f"{each.field}: {each.problem}".removeprefix(": "))
        for key, row in zip(wanted, rows, strict=True):
            row["problems"] += bad.get(str(key.service), ())
            _add_traffic(row, totals.get(key, _NONE), now)
        return {"services": rows, "found": len(found), "all": len(keys), "start": asked.start,
                "counted": self._traffic is not None}


def _describe(
    plans: Sequence[FamilyPlans], keys: Sequence[ServicePortKey], now: float
) -> list[dict[str, Any]]:
    return [_row(plans, key, now) for key in keys]


def _row(plans: Sequence[FamilyPlans], key: ServicePortKey, now: float) -> dict[str, Any]:
    frontends: list[str] = []
    endpoints: dict[str, str] = {}
    """With the reason why each is in quarantine; "": it is not."""
    problems: list[str] = []
    resting = False
    for family in plans:
        plan = family.plans.get(key)
        if plan is None:
            continue
        frontends += map(_frontend, plan.frontends())
        endpoints |= {format_socket(*where): sentence.reason(now) for where, sentence in plan.quarantined}
        endpoints |= {format_socket(*where): "" for where in plan.reachable}
        resting = resting or bool(plan.resting)
        if problem := family.unserved.get(key):
            problems.append(f"{family.family.label}: {problem}")
    if not endpoints:
        problems.append("every endpoint has weight 0" if resting else "no endpoints")
    return {
        "namespace": key.namespace, "name": key.name, "port": key.port_name, "protocol": key.protocol.name,
        "service_port": str(key), "frontends": list(dict.fromkeys(frontends)),
        "endpoints": [{"endpoint": where, "usable": True, "quarantine": reason}
                      for where, reason in islice(endpoints.items(), _MOST_ENDPOINTS)],
        "endpoint_count": len(endpoints), "problems": problems,
    }  # fmt: skip


def _frontend(frontend: Frontend) -> str:
    address, _, port = frontend
    return f"node:{port}" if address is None else format_socket(address, port)


def _add_traffic(row: dict[str, Any], total: Total, now: float) -> None:
    row |= {"forwarded": total.forwarded, "rejected": total.rejected, "failed": total.failures,
            "rate": round(total.rate, 3), **total.volume._asdict()}
    to = {format_socket(*where): one for where, one in list(total.endpoints.items())}
    for endpoint in row["endpoints"]:
        one = to.pop(endpoint["endpoint"], None)
        endpoint |= _of_endpoint(one or EndpointTotal())
    row["endpoints"] += [
        {"endpoint": name, "usable": False, **_of_endpoint(one), "seconds_ago": round(now - one.last)}
        for name, one in sorted(to.items(), key=lambda item: -item[1].last)[:_MOST_ENDPOINTS]
        if row["endpoint_count"] <= _MOST_ENDPOINTS
    ]


def _of_endpoint(total: EndpointTotal) -> dict[str, Any]:
    failed = {failure.value: total.failed.get(failure, 0) for failure in Failure}
    return {"forwarded": total.forwarded, **failed, **total.volume._asdict()}
