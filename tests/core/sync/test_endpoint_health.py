"""Which endpoints are watched, and what follows from what connection tracking tells of them."""

import logging
from collections.abc import Callable, Mapping, Sequence

import pytest

from kproxy_conformance.builders import destinations, endpoint, endpoint_slice, node_view, service
from kproxy_core.linux.conntrack import TcpFlow
from kproxy_core.model.address import parse_address
from kproxy_core.model.service import Destination, ServiceName
from kproxy_core.plan.quarantine import Quarantined, Sentence
from kproxy_core.plan.service_plan import ServicePlan, plan_service
from kproxy_core.sync.difference import Step
from kproxy_core.sync.endpoint_health import EndpointHealth, WatchedEndpoints
from tests.core.loop_rig import Clock

pytestmark = pytest.mark.pure

ONE, TWO = destinations("10.0.0.1:8080 10.0.0.2:8080")


def plan(name: str, *addresses: str, quarantined: Quarantined | None = None) -> ServicePlan:
    slices = {"": endpoint_slice(name, *(endpoint(address, "node1") for address in addresses))}
    (found,) = plan_service(service(name), slices, node_view("node1"), quarantined)
    return found


def watched(*plans: ServicePlan) -> WatchedEndpoints:
    found = WatchedEndpoints()
    for each in plans:
        found.follow(each.key, None, each)
    return found


@pytest.mark.parametrize(("given", "services"), [
    (plan("web", "10.0.0.1", "10.0.0.2", quarantined={}), {ONE: ["web"], TWO: ["web"]}),
    (plan("web", "10.0.0.1", "10.0.0.2", quarantined={ONE: Sentence(1.0, 3)}), {ONE: ["web"], TWO: ["web"]}),
    (plan("web", "10.0.0.1", quarantined={}), {ONE: [], TWO: []}),
    (plan("web", "10.0.0.1", "10.0.0.2"), {ONE: [], TWO: []}),
])  # fmt: skip
def test_endpoints_are_watched_if_the_service_has_others(
    given: ServicePlan, services: Mapping[Destination, list[str]]
) -> None:
    found = watched(given)
    assert {where: [name.name for name in found.services(where)] for where in services} == services
    assert bool(found) is any(services.values())
    assert [where in found for where in services] == [bool(names) for names in services.values()]


def test_an_endpoint_is_watched_until_its_last_service_stops_asking() -> None:
    web, other = (plan(name, "10.0.0.1", "10.0.0.2", quarantined={}) for name in ("web", "other"))
    found = watched(web, other)
    assert {name.name for name in found.services(ONE)} == {"web", "other"}
    found.follow(web.key, web, plan("web", "10.0.0.1", "10.0.0.2"))
    assert {name.name for name in found.services(ONE)} == {"other"}
    assert set(found.local) == {ONE.address, TWO.address}
    found.follow(other.key, other, None)
    assert not found
    assert not found.local


def flow(id_: bytes, where: Destination, client: str = "10.2.0.9", *, is_assured: bool = False) -> TcpFlow:
    return TcpFlow(
        id_, parse_address(client), where, where, is_answered=False, is_assured=is_assured, timeout=100)


class Table:
    """What connection tracking tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[TcpFlow] = []
        self.answered: list[TcpFlow] = []
        for name, read in {
            "read_unanswered_to": lambda of, most: list(self.waiting),
            "read_answered_by": lambda of, most: list(self.answered),
            "read_answered_by_one": lambda where, most: [
                one for one in self.answered if one.endpoint == where],
        }.items():
            monkeypatch.setattr(f"kproxy_core.sync.endpoint_health.{name}", read)

    def wait(self, where: Destination, clients: str) -> None:
        first = len(self.waiting)
        self.waiting += [flow(bytes([number]), where, client)
                         for number, client in enumerate(clients.split(), first)]  # fmt: skip


def test_quarantine_is_applied_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("kproxy").propagate = True
    clock, table = Clock(), Table(monkeypatch)
    applied: list[tuple[list[Destination], list[str]]] = []
    reports: list[tuple[ServiceName, str]] = []
    health = EndpointHealth(
        lambda shut, names: applied.append((list(shut), sorted(name.name for name in names))),
        lambda name, note: reports.append((name, note)), count_refusals=False, clock=clock)
    watched_plan = plan("web", "10.0.0.1", "10.0.0.2", quarantined={})
    health.follow([Step(watched_plan.key, None, watched_plan)])

    def look(at: float) -> list[tuple[str, float]]:
        clock.now = at
        health.look()
        return [(one.name, one.value) for one in health.measure()]

    with caplog.at_level(logging.INFO, "kproxy.run"):
        table.wait(ONE, "10.2.0.1 10.2.0.2 10.2.0.1")
        look(10.0)
        look(10.25)
        table.wait(ONE, "10.2.0.2")
        table.answered.append(flow(b"other", TWO))
        assert look(11.2) == [("kproxy_quarantined_endpoints", 1), ("kproxy_quarantines_total", 1)]
        assert applied == [([ONE], ["web"])]
        assert reports == [(watched_plan.key.service, (
            "endpoint 10.0.0.1:8080 is in quarantine on this node: 3 of 3 attempts unanswered"))]
        table.answered.append(flow(table.waiting.pop().id, ONE))
        assert look(12.2) == [("kproxy_quarantined_endpoints", 0), ("kproxy_quarantines_total", 1)]
        assert applied[1:] == [([], ["web"])]
    assert [record.getMessage() for record in caplog.records] == [
        "endpoint put into quarantine", "endpoint is out of quarantine"]


def test_refusals_count_like_attempts_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of endpoints that nothing watches, nor resets of established connections."""
    clock, table = Clock(), Table(monkeypatch)
    shut: list[list[Destination]] = []
    told: list[Callable[[Sequence[TcpFlow], bool], None]] = []
    monkeypatch.setattr(
        "kproxy_core.sync.endpoint_health.ResetWatch", lambda _name, ended: told.append(ended))
    health = EndpointHealth(
        lambda endpoints, _: shut.append(list(endpoints)), lambda *_: None, count_refusals=True, clock=clock)
    watched_plan = plan("web", "10.0.0.1", "10.0.0.2", quarantined={})
    health.follow([Step(watched_plan.key, None, watched_plan)])
    health.look()
    (refuse,) = told

    def look(at: float, *ended: TcpFlow) -> None:
        clock.now = at
        refuse(ended, False)
        health.look()

    elsewhere = Destination(parse_address("10.0.0.3"), 8080)
    clients = ("10.2.0.1", "10.2.0.2", "10.2.0.3")
    refused = [flow(client.encode(), ONE, client) for client in clients]
    established = [flow(client[::-1].encode(), TWO, client, is_assured=True) for client in clients]
    look(10.0, *refused, *established, *(one._replace(endpoint=elsewhere) for one in refused))
    look(10.25)
    table.answered.append(flow(b"other", TWO))
    look(10.3, flow(b"again", ONE))
    look(11.5)
    assert shut == [[ONE]]
