"""Totals of connections: no count is lost or added twice, and series are limited."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.contract.values import Connections, Failure, Handshake
from kproxy_core.linux.conntrack_volumes import NatBinding, Volume
from kproxy_core.linux.relay import counts as attribution
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.observe.traffic.recorder import Stored, StoredTotals
from kproxy_core.observe.traffic.series import (
    SERVICE_COUNTERS,
    SERVICE_HISTOGRAM,
    Chosen,
    LimitedSeries,
    TrafficCollector,
)
from kproxy_core.observe.traffic.totals import KEPT, Counts, Totals
from kproxy_core.plan.service_plan import Frontend

V4 = Family.IPV4
WEB = ServicePortKey("default", "web", "http", Protocol.TCP)
VIP = Frontend(Address(bytes([10, 96, 0, 1])), Protocol.TCP, 80)
ONE, TWO = (Destination(Address(bytes([10, 1, 0, last])), 8080) for last in (1, 2))


def counted(*readings: dict[Destination | None, int]) -> Totals:
    totals, counts = Totals(), Counts()
    for now, reading in enumerate(readings):
        made = counts.new(V4, [Connections(VIP, where, number) for where, number in reading.items()])
        totals.add(V4, made, lambda family, frontend: WEB, now)
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


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30))
def test_elements_that_are_read_again_as_the_same_objects_are_counted_once(
    steps: list[tuple[int, int]]
) -> None:
    """Two elements are of the same pair. Each step adds connections to one of the three, or removes it."""
    endpoints = ONE, ONE, TWO
    elements: dict[int, Connections] = {}
    totals, counts, made = Totals(), Counts(), {ONE: 0, TWO: 0}
    for which, more in steps:
        where = endpoints[which]
        if more:
            before = elements.get(which)
            elements[which] = Connections(VIP, where, more + (before.number if before else 0))
            made[where] += more
        elif which == 2 and which in elements:
            del elements[which]
            for _ in range(3):  # It is forgotten, and begins again.
                totals.add(V4, counts.new(V4, list(elements.values())), lambda family, frontend: WEB, 1.0)
        totals.add(V4, counts.new(V4, list(elements.values())), lambda family, frontend: WEB, 1.0)
    found = totals.of[WEB].endpoints if made[ONE] + made[TWO] else {}
    assert {where: to.forwarded for where, to in found.items()} == {
        where: number for where, number in made.items() if number}


def test_refusals_and_endpoints_are_distinguished() -> None:
    total = counted({None: 4, ONE: 1, TWO: 2}).of[WEB]
    assert (total.rejected, total.forwarded) == (4, 3)
    assert {where: to.forwarded for where, to in total.endpoints.items()} == {ONE: 1, TWO: 2}


def test_failures_that_a_backend_counts_are_those_of_its_connections() -> None:
    totals, counts = Totals(), Counts()
    for made, refused in ((3, 0), (5, 2), (6, 3)):
        reading = [Connections(VIP, ONE, made, failed=(refused, 0, 0))]
        totals.add(V4, counts.new(V4, reading), lambda family, frontend: WEB, 1.0)
    total = totals.of[WEB]
    assert (total.forwarded, total.failed) == (6, {Failure.REFUSED: 3})
    assert total.endpoints[ONE].failed == {Failure.REFUSED: 3}


def test_bytes_and_packets_that_a_backend_counts_are_no_connections() -> None:
    totals, counts = Totals(), Counts()
    for made, sent, received in ((1, 0, 0), (1, 10, 5), (2, 12, 5)):
        reading = [Connections(VIP, ONE, made, carried=(made * 3, sent, made * 2, received))]
        totals.add(V4, counts.new(V4, reading), lambda family, frontend: WEB, 1.0)
    total = totals.of[WEB]
    assert (total.forwarded, total.failed, total.volume) == (2, {}, Volume(6, 12, 4, 5))
    assert total.endpoints[ONE].volume == total.volume


SHAKEN = [
    Connections(VIP, ONE, 3, handshakes=(0, 2, 0, 0, 0, 0, 0, 1, 1_001_200)),
    Connections(VIP, TWO, 1, handshakes=(0, 0, 0, 0, 1, 0, 0, 0, 20_000)),
]  # fmt: skip


def shaken() -> Totals:
    totals = Totals()
    totals.add(V4, Counts().new(V4, SHAKEN), lambda family, frontend: WEB, 1.0)
    return totals


def test_handshakes_that_a_backend_counts_are_those_of_its_connections() -> None:
    total = shaken().of[WEB]
    assert (total.forwarded, total.failed, total.volume) == (4, {}, Volume())
    assert total.endpoints[TWO].handshakes == (0, 0, 0, 0, 1, 0, 0, 0, 20_000)
    assert total.handshakes == (0, 2, 0, 0, 1, 0, 0, 1, 1_021_200)


def test_handshakes_without_an_owner_are_no_unknown_connections() -> None:
    totals = Totals()
    totals.add(V4, Counts().new(V4, SHAKEN), lambda family, frontend: None, 1.0)
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


def test_each_scrape_shows_the_present_totals() -> None:
    totals = shaken()
    recorder: Any = SimpleNamespace(read=lambda: totals.of, failures=SimpleNamespace(lost=0))
    collector = TrafficCollector(recorder, endpoints=True, limit=1000)

    def scrape() -> dict[str, float]:
        return {
            sample.labels.get("endpoint", "all"): sample.value for metric in collector.collect()
            for sample in metric.samples if sample.name.endswith("_connections_total")
        }  # fmt: skip

    assert scrape() == scrape() == {"all": 4, "10.1.0.1:8080": 3, "10.1.0.2:8080": 1}
    totals.add(V4, [Connections(VIP, TWO, 2)], lambda family, frontend: WEB, 2.0)
    assert scrape() == {"all": 6, "10.1.0.1:8080": 3, "10.1.0.2:8080": 3}
    totals.forget(lambda key: True, lambda key, where: False, KEPT + 1.5)
    assert scrape() == {"all": 6, "10.1.0.2:8080": 3}
    changes = totals.of[WEB].changes
    totals.of = counted({TWO: 5}).of
    totals.of[WEB].changes = changes
    assert scrape() == {"all": 5, "10.1.0.2:8080": 5}


def test_without_handshakes_no_histogram_has_series() -> None:
    assert exposed(counted({ONE: 3}), 10) == {"summed": {"": 0}}


def test_workers_have_the_same_numbers_and_divide_handshakes_at_the_same_bounds() -> None:
    ranges = [one for one in Handshake if one is not Handshake.MICROSECONDS]
    assert [bound / 1e9 for bound in attribution._BOUNDS] == [float(one.value) for one in ranges[:-1]]
    numbers = [None, *Failure, *Handshake]
    assert numbers[attribution.MADE] is None
    for place, failure in ((attribution.REFUSED, Failure.REFUSED), (attribution.RESET, Failure.RESET),
                           (attribution.UNANSWERED, Failure.UNANSWERED)):
        assert numbers[place] is failure
    assert numbers[attribution._SUM] is Handshake.MICROSECONDS


@pytest.mark.parametrize(("seconds", "place"), [
    (0, 0), (0.000249, 0), (0.00025, 1), (0.0009, 1), (0.003, 2), (0.004, 3), (0.063, 4), (0.2, 5),
    (0.999, 6), (1, 7), (30, 7),
])  # fmt: skip
def test_a_handshake_belongs_to_the_range_that_it_ends_in(seconds: float, place: int) -> None:
    tally, where = attribution.Tally(), ("10.1.0.1", 8080)
    attribution.FrontendCounts(tally, (None, 6, 80)).shake(where, round(seconds * 1_000_000_000))
    (count,) = tally.report()
    wanted = [0] * 8
    wanted[place] = 1
    assert count.numbers == (0, 0, 0, 0, *wanted, round(seconds * 1_000_000))


def test_a_worker_reports_each_connection_once_however_long_a_pair_was_idle() -> None:
    tally, where, other = attribution.Tally(), ("10.1.0.1", 8080), ("10.1.0.2", 8080)
    counted, again = (attribution.FrontendCounts(tally, (None, 6, 80)) for _ in range(2))
    for one in (counted, again, counted):
        one[where][attribution.MADE] += 1
    counted[other][attribution.MADE] += 1
    assert [(count.endpoint, count.numbers[0]) for count in tally.report()] == [
        (where, 2), (other, 1), (where, 1)]
    for idle in range(3):
        assert [tally.report() for _ in range(idle)] == [[]] * idle
        counted.shake(where, 500_000_000)
        again[where][attribution.RESET] += 1
        assert sorted(count.numbers for count in tally.report()) == [
            (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 500_000), (0, 0, 0, 1, *[0] * 9)]


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
        Connections(VIP, ONE, 3, "", (0, 0, 0), (0, 0, 0, 7), (0, 0, 0, 0, 0, 0, 0, 2, 0)),
        Connections(VIP._replace(address=None), None, 2)])
    totals = Totals()
    totals.add(V4, made, lambda family, frontend: WEB, 1.0)
    totals.carry(WEB, ONE, Volume(1, 2, 3, 4), 1.0, is_endpoint=True)
    to_one = NatBinding(V4, Protocol.TCP, Address(bytes(4)), b"\0P", ONE.address, b"\x1f\x90")
    alive = {to_one: Volume(5, 6, 7, 8)}
    StoredTotals(str(tmp_path / "state")).write(Stored("one", totals.of, list(counts), alive).encoded())
    found = StoredTotals(str(tmp_path / "state")).read(1.0)
    assert found == Stored("one", totals.of, list(counts), alive)
    assert found.totals[WEB].endpoints[ONE].volume == Volume(1, 2, 3, 11)
    assert found.totals[WEB].handshakes == (0, 0, 0, 0, 0, 0, 0, 2, 0)


OF_ANOTHER_BOOT = msgspec.msgpack.encode(("another", Stored("one")))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x90", b"\0", OF_ANOTHER_BOOT])
def test_an_unusable_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    StoredTotals(str(tmp_path)).write(Stored("one").encoded())
    (written,) = tmp_path.iterdir()
    written.write_bytes(content)
    assert StoredTotals(str(tmp_path)).read(0.0) == Stored()


@pytest.mark.parametrize("make", ["link", "pipe"])
def test_a_link_or_a_pipe_is_not_followed(tmp_path: Path, make: str) -> None:
    stored = StoredTotals(str(tmp_path / "state"))
    stored.write(Stored("one").encoded())
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
    stored.write(Stored("two").encoded())
    assert stored.read(0.0) == Stored("two", {}, [], {})
    assert victim.read_text() == "precious"


def service_port(name: str) -> ServicePortKey:
    return ServicePortKey("default", name, "", Protocol.TCP)


def chosen(limited: LimitedSeries, present: Mapping[str, tuple[int, ...]]) -> list[Chosen]:
    """Return the series of a scrape in which these service ports exist."""
    for name in "abcde":
        limited.update(service_port(name), {None: present[name]} if name in present else {})
    return list(limited.chosen())


def shown(limited: LimitedSeries, present: Mapping[str, int]) -> dict[str, int]:
    """Return the first series of each service port with this number of connections."""
    values = {name: (value, *[0] * 8) for name, value in present.items()}
    return {one.labels[1]: one.values[0] for one in chosen(limited, values)}


def test_series_beyond_the_limit_are_summed_up_and_the_sum_never_falls() -> None:
    limited = LimitedSeries(2, SERVICE_COUNTERS, ())
    steps = [
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 1, "b": 2, "other": 7}),
        ({"b": 2, "c": 5, "d": 4}, {"b": 2, "other": 9}),
        ({"b": 2, "d": 4, "e": 1}, {"b": 2, "e": 1, "other": 9}),
        ({"b": 2, "d": 6, "e": 1}, {"b": 2, "e": 1, "other": 11}),
    ]
    for present, wanted in steps:
        assert shown(limited, present) == wanted
    assert limited.summed == 1


def test_the_sum_contains_all_connections_of_an_endpoint_that_is_counted_from_0_again() -> None:
    limited = LimitedSeries(1, SERVICE_COUNTERS, ())
    for value, other in ((5, 5), (0, 5), (7, 12), (3, 15)):
        assert shown(limited, {"a": 1, "b": value}) == {"a": 1, "other": other}


def test_a_row_is_listed_as_far_as_there_was_room() -> None:
    """Both directions exist once there is traffic in one of them."""
    limited = LimitedSeries(3, SERVICE_COUNTERS, ())

    def scrape(*numbers: int) -> dict[tuple[str, str, str], int]:
        limited.update(service_port("web"), {None: numbers})
        return {
            (one.metric.rpartition("_")[2], one.labels[1], one.labels[-1]): one.values[0]
            for one in limited.chosen()
        }  # fmt: skip

    first = {("connections", "web", "forwarded"): 1}
    assert scrape(1, 0, 0, 0, 0, 0, 0, 0, 0) == first
    assert limited.summed == 0
    volume = {("packets", "web", "to_endpoint"): 2, ("bytes", "web", "to_endpoint"): 90}
    others = {("packets", "other", "from_endpoint"): 0, ("bytes", "other", "from_endpoint"): 0}
    assert scrape(1, 0, 0, 0, 0, 2, 90, 0, 0) == first | volume | others
    assert limited.summed == 2
    others = {("packets", "other", "from_endpoint"): 3, ("bytes", "other", "from_endpoint"): 120}
    refused = {("failures", "other", "refused"): 1}
    assert scrape(1, 0, 1, 0, 0, 2, 90, 3, 120) == first | volume | others | refused
    assert limited.summed == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 9)), max_size=40))
def test_histograms_of_the_limited_add_up_to_all(steps: list[tuple[int, int, int]]) -> None:
    """Each step is a handshake of one service, and a scrape."""
    limited, totals = LimitedSeries(2, SERVICE_HISTOGRAM, ()), dict.fromkeys("abcd", (0, 0))
    for which, count, microseconds in steps:
        name = "abcd"[which]
        before = totals[name]
        totals[name] = before[0] + count, before[1] + microseconds
        present = {name: values for name, values in totals.items() if any(values)}
        found = chosen(limited, present)
        assert len(found) == min(len(present), 3)
        assert [sum(each) for each in zip(*(one.values for one in found), strict=True)] == [
            sum(each) for each in zip(*present.values(), strict=True)]
        assert all(len(one.labels) == 4 for one in found)
