"""Totals of connections: no count is lost or added twice, and series are limited."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.backend.api import Carried, Connections, Failure, Handshake
from kproxy_core.host.conntrack.volumes import Volume, Way
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.observe.metrics.traffic import (
    SERVICE_CONNECTIONS,
    SERVICE_HANDSHAKES,
    LimitedSeries,
    TrafficCollector,
    _Series,
)
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.traffic.stored import Stored, StoredTotals
from kproxy_core.traffic.totals import KEPT, Counts, Totals
from kproxy_userspace.worker import attribution

V4 = Family.IPV4
WEB = ServicePortKey("default", "web", "http", Protocol.TCP)
VIP = Frontend(Address(bytes([10, 96, 0, 1])), Protocol.TCP, 80)
ONE, TWO = (Destination(Address(bytes([10, 1, 0, last])), 8080) for last in (1, 2))


def counted(*readings: dict[Destination | None, int]) -> Totals:
    totals, counts = Totals(), Counts()
    for now, reading in enumerate(readings):
        made = counts.new(V4, [Connections(VIP, where, number) for where, number in reading.items()])
        totals.add(made, lambda family, frontend: WEB, now)
    return totals


READINGS = {
    "grows": (({ONE: 3}, {ONE: 5}), 5),
    "two endpoints": (({ONE: 3, TWO: 1}, {ONE: 3, TWO: 2}), 5),
    "begins again": (({ONE: 3}, {ONE: 2}), 5),
    "begins again at nothing": (({ONE: 3}, {}, {}, {}, {ONE: 4}), 7),
    "missing in one dump": (({ONE: 3}, {}, {ONE: 4}), 4),
    "nothing": (({}, {}), 0),
}


@pytest.mark.parametrize(("readings", "wanted"), READINGS.values(), ids=READINGS)
def test_totals(readings: tuple[dict[Destination | None, int], ...], wanted: int) -> None:
    totals = counted(*readings)
    assert sum(total.forwarded for total in totals.of.values()) == wanted


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_no_connection_is_lost_whenever_a_count_begins_again(steps: list[tuple[bool, int]]) -> None:
    """Each step is a reading. A count that has begun again is noticed while it is smaller than before."""
    count, made = 0, 0
    readings: list[dict[Destination | None, int]] = []
    for again, more in steps:
        count = (0 if again and 0 < more < count else count) + more
        made += more
        readings.append({ONE: count} if count else {})
    totals = counted(*readings)
    assert sum(total.forwarded for total in totals.of.values()) == made


def test_refusals_and_endpoints_are_distinguished() -> None:
    total = counted({None: 4, ONE: 1, TWO: 2}).of[WEB]
    assert (total.rejected, total.forwarded) == (4, 3)
    assert {where: to.forwarded for where, to in total.endpoints.items()} == {ONE: 1, TWO: 2}


def test_failures_that_a_backend_counts_are_those_of_its_connections() -> None:
    totals, counts = Totals(), Counts()
    for made, refused in ((3, 0), (5, 2), (6, 3)):
        reading = [Connections(VIP, ONE, made), Connections(VIP, ONE, refused, failure=Failure.REFUSED)]
        totals.add(counts.new(V4, reading), lambda family, frontend: WEB, 1.0)
    total = totals.of[WEB]
    assert (total.forwarded, total.failed) == (6, {Failure.REFUSED: 3})
    assert total.endpoints[ONE].failed == {Failure.REFUSED: 3}


def test_bytes_that_a_backend_counts_are_no_connections() -> None:
    totals, counts = Totals(), Counts()
    for made, sent, received in ((1, 0, 0), (1, 10, 5), (2, 12, 5)):
        totals.add(counts.new(V4, [
            Connections(VIP, ONE, made), Connections(VIP, ONE, sent, carried=Carried.TO_ENDPOINT),
            Connections(VIP, ONE, received, carried=Carried.FROM_ENDPOINT),
        ]), lambda family, frontend: WEB, 1.0)  # fmt: skip
    total = totals.of[WEB]
    assert (total.forwarded, total.failed, total.volume) == (2, {}, Volume(0, 12, 0, 5))
    assert total.endpoints[ONE].volume == total.volume


SHAKEN = [
    Connections(VIP, ONE, 3), Connections(VIP, TWO, 1),
    Connections(VIP, ONE, 2, handshake=Handshake.WITHIN_1_MS),
    Connections(VIP, ONE, 1, handshake=Handshake.LONGER),
    Connections(VIP, ONE, 1_001_200, handshake=Handshake.MICROSECONDS),
    Connections(VIP, TWO, 1, handshake=Handshake.WITHIN_64_MS),
    Connections(VIP, TWO, 20_000, handshake=Handshake.MICROSECONDS),
]  # fmt: skip


def shaken() -> Totals:
    totals = Totals()
    totals.add(Counts().new(V4, SHAKEN), lambda family, frontend: WEB, 1.0)
    return totals


def test_handshakes_that_a_backend_counts_are_those_of_its_connections() -> None:
    total = shaken().of[WEB]
    assert (total.forwarded, total.failed, total.volume) == (4, {}, Volume())
    assert total.endpoints[TWO].handshakes == [0, 0, 0, 0, 1, 0, 0, 0, 20_000]
    assert total.handshakes == [0, 2, 0, 0, 1, 0, 0, 1, 1_021_200]


def test_handshakes_without_an_owner_are_no_unknown_connections() -> None:
    totals = Totals()
    totals.add(Counts().new(V4, SHAKEN), lambda family, frontend: None, 1.0)
    assert totals.unknown == 4


def exposed(totals: Totals, limit: int, *, endpoints: bool = True) -> dict[str, dict[str, float]]:
    """Return the histograms of a scrape by service, and by endpoint."""
    recorder: Any = SimpleNamespace(read=lambda: totals.of, failures=SimpleNamespace(lost=0))
    found: dict[str, dict[str, float]] = {}
    for metric in TrafficCollector(recorder, endpoints=endpoints, limit=limit).collect():
        for sample in metric.samples if metric.type == "histogram" else ():
            labels = sample.labels
            of = labels.get("endpoint") or labels["service"]
            of = f"{of} by endpoint" if of == "other" and "endpoint" in labels else of
            found.setdefault(of, {})[labels.get("le", sample.name.rpartition("_")[2])] = sample.value
        if metric.name == "kproxy_traffic_series_summed":
            found["summed"] = {"": metric.samples[0].value}
    return found


def test_a_histogram_has_the_faster_handshakes_in_each_bucket() -> None:
    web = {"0.00025": 0, "0.001": 2, "0.004": 2, "0.016": 2, "0.064": 3, "0.256": 3, "1.0": 3, "+Inf": 4}
    one = {"0.00025": 0, "0.001": 2, "0.004": 2, "0.016": 2, "0.064": 2, "0.256": 2, "1.0": 2, "+Inf": 3}
    two = {"0.00025": 0, "0.001": 0, "0.004": 0, "0.016": 0, "0.064": 1, "0.256": 1, "1.0": 1, "+Inf": 1}
    service = {"web": {**web, "count": 4, "sum": 1.0212}}
    assert exposed(shaken(), 1000, endpoints=False) == {**service, "summed": {"": 0}}
    assert exposed(shaken(), 1000) == {
        **service, "10.1.0.1:8080": {**one, "count": 3, "sum": 1.0012},
        "10.1.0.2:8080": {**two, "count": 1, "sum": 0.02}, "summed": {"": 0},
    }  # fmt: skip


@pytest.mark.parametrize("limit", [1, 40, 79])
def test_histograms_have_a_quarter_as_many_series_as_counters(limit: int) -> None:
    found = exposed(shaken(), limit)
    assert found["web"]["count"] == 4
    assert found["other by endpoint"]["+Inf"] == found["other by endpoint"]["count"] == 4
    assert found["other by endpoint"]["sum"] == pytest.approx(1.0212)
    assert found["summed"] == {"": 20 + (2 if limit == 1 else 0)}


def test_without_handshakes_no_histogram_has_series() -> None:
    assert exposed(counted({ONE: 3}), 10) == {"summed": {"": 0}}


def test_workers_divide_handshakes_at_the_same_bounds() -> None:
    ranges = [one for one in Handshake if one is not Handshake.MICROSECONDS]
    assert [bound / 1_000_000 for bound in attribution._BOUNDS] == [float(one.value) for one in ranges[:-1]]
    assert list(Handshake)[attribution._SUM] is Handshake.MICROSECONDS


@pytest.mark.parametrize(("seconds", "place"), [
    (0, 0), (0.000249, 0), (0.00025, 1), (0.0009, 1), (0.003, 2), (0.004, 3), (0.063, 4), (0.2, 5),
    (0.999, 6), (1, 7), (30, 7),
])  # fmt: skip
def test_a_handshake_belongs_to_the_range_that_it_ends_in(seconds: float, place: int) -> None:
    tally, where = attribution.Tally(), ("10.1.0.1", 8080)
    tally.shake(where, where, seconds)
    assert {count.handshake: count.number for count in tally.report()} == {
        place: 1, attribution._SUM: int(seconds * 1_000_000)}


def test_a_former_endpoint_is_kept_for_an_hour_and_its_connections_for_good() -> None:
    totals = counted({ONE: 1}, {ONE: 1, TWO: 1})
    totals.forget(lambda key: True, lambda key, where: where == TWO, KEPT)
    assert set(totals.of[WEB].endpoints) == {ONE, TWO}
    totals.forget(lambda key: True, lambda key, where: where == TWO, KEPT + 1)
    assert set(totals.of[WEB].endpoints) == {TWO}
    assert totals.of[WEB].forwarded == 2
    totals.forget(lambda key: False, lambda key, where: False, 2 * KEPT)
    assert totals.of == {}


def test_totals_outlive_the_process(tmp_path: Path) -> None:
    counts = Counts()
    made = counts.new(V4, [
        Connections(VIP, ONE, 3), Connections(VIP._replace(address=None), None, 2),
        Connections(VIP, ONE, 0, failure=Failure.RESET),
        Connections(VIP, ONE, 7, carried=Carried.FROM_ENDPOINT),
        Connections(VIP, ONE, 2, handshake=Handshake.LONGER)])
    totals = Totals()
    totals.add(made, lambda family, frontend: WEB, 1.0)
    totals.carry(WEB, ONE, Volume(1, 2, 3, 4), 1.0, is_endpoint=True)
    alive = {Way(V4, Protocol.TCP, Address(bytes(4)), b"\0P", ONE.address, b"\x1f\x90"): Volume(5, 6, 7, 8)}
    StoredTotals(str(tmp_path / "state")).write("one", totals.of, counts, alive)
    found = StoredTotals(str(tmp_path / "state")).read(1.0)
    assert found == Stored("one", totals.of, list(counts), alive)
    assert found.totals[WEB].endpoints[ONE].volume == Volume(1, 2, 3, 11)
    assert found.totals[WEB].handshakes == [0, 0, 0, 0, 0, 0, 0, 2, 0]


def test_the_file_of_an_older_version_has_no_handshakes(tmp_path: Path) -> None:
    StoredTotals(str(tmp_path)).write("one", shaken().of, [], {})
    (written,) = tmp_path.iterdir()
    older = json.loads(written.read_text())
    older["totals"] = [
        [*item[:6], [endpoint[:7] for endpoint in item[6]], *item[7:11]] for item in older["totals"]]
    written.write_text(json.dumps(older))
    (total,) = StoredTotals(str(tmp_path)).read(0.0).totals.values()
    assert (total.forwarded, total.volume, total.handshakes) == (4, Volume(), [])
    assert {to.forwarded: to.handshakes for to in total.endpoints.values()} == {3: [], 1: []}


def test_the_file_of_an_older_version_has_no_volumes(tmp_path: Path) -> None:
    StoredTotals(str(tmp_path)).write("one", counted({ONE: 3}).of, [], {})
    (written,) = tmp_path.iterdir()
    older = json.loads(written.read_text())
    del older["alive"]
    older["totals"] = [[*item[:6], [endpoint[:3] for endpoint in item[6]]] for item in older["totals"]]
    written.write_text(json.dumps(older))
    (total,) = StoredTotals(str(tmp_path)).read(0.0).totals.values()
    assert (total.forwarded, total.volume) == (3, Volume())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"boot": "another"}', "\0"])
def test_an_unusable_file_is_ignored(tmp_path: Path, content: str) -> None:
    StoredTotals(str(tmp_path)).write("one", {}, [], {})
    (written,) = tmp_path.iterdir()
    written.write_text(content)
    assert StoredTotals(str(tmp_path)).read(0.0) == Stored()


@pytest.mark.parametrize("make", ["link", "pipe"])
def test_a_link_or_a_pipe_is_not_followed(tmp_path: Path, make: str) -> None:
    stored = StoredTotals(str(tmp_path / "state"))
    stored.write("one", {}, [], {})
    (written,) = (tmp_path / "state").iterdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for path in (written, written.with_suffix(".new")):
        path.unlink(missing_ok=True)
        if make == "link":
            path.symlink_to(victim)
        else:
            os.mkfifo(path)
    assert stored.read(0.0) == Stored()
    stored.write("two", {}, [], {})
    assert stored.read(0.0) == Stored("two", {}, [], {})
    assert victim.read_text() == "precious"


def series(name: str, value: int) -> _Series:
    return _Series(SERVICE_CONNECTIONS, ("default", name, "", "TCP", "forwarded"), (value,))


def shown(chosen: list[_Series]) -> dict[str, int]:
    return {one.labels[1]: one.values[0] for one in chosen}


def test_series_beyond_the_limit_are_summed_up_and_the_sum_never_falls() -> None:
    limited = LimitedSeries(2)
    steps = [
        ([series("a", 1), series("b", 2)], {"a": 1, "b": 2}),
        ([series("a", 1), series("b", 2), series("c", 3), series("d", 4)], {"a": 1, "b": 2, "other": 7}),
        ([series("b", 2), series("c", 5), series("d", 4)], {"b": 2, "other": 9}),
        ([series("b", 2), series("d", 4), series("e", 1)], {"b": 2, "e": 1, "other": 9}),
        ([series("b", 2), series("d", 6), series("e", 1)], {"b": 2, "e": 1, "other": 11}),
    ]
    for given_series, wanted in steps:
        assert shown(list(limited.choose(given_series))) == wanted
    assert limited.summed == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 9)), max_size=40))
def test_histograms_of_the_limited_add_up_to_all(steps: list[tuple[int, int, int]]) -> None:
    """Each step is a handshake of one service, and a scrape."""
    limited, totals = LimitedSeries(2), dict.fromkeys("abcd", (0, 0))
    for which, count, microseconds in steps:
        name = "abcd"[which]
        before = totals[name]
        totals[name] = before[0] + count, before[1] + microseconds
        present = [
            _Series(SERVICE_HANDSHAKES, ("default", name, "", "TCP"), values)
            for name, values in totals.items() if any(values)]
        chosen = list(limited.choose(present))
        assert len(chosen) == min(len(present), 3)
        assert [sum(each) for each in zip(*(one.values for one in chosen), strict=True)] == [
            sum(each) for each in zip(*(one.values for one in present), strict=True)]
        assert all(len(one.labels) == 4 for one in chosen)
