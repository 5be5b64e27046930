"""Totals of connections: no count is lost or added twice, and series are limited."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.backend.api import Carried, Connections, Failure
from kproxy_core.host.conntrack.volumes import Volume, Way
from kproxy_core.model.address import Address, Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.observe.metrics.traffic import SERVICE_CONNECTIONS, LimitedSeries, _Series
from kproxy_core.plan.service_plan import Frontend
from kproxy_core.traffic.stored import Stored, StoredTotals
from kproxy_core.traffic.totals import KEPT, Counts, Totals

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
        Connections(VIP, ONE, 7, carried=Carried.FROM_ENDPOINT)])
    totals = Totals()
    totals.add(made, lambda family, frontend: WEB, 1.0)
    totals.carry(WEB, ONE, Volume(1, 2, 3, 4), 1.0, is_endpoint=True)
    alive = {Way(V4, Protocol.TCP, Address(bytes(4)), b"\0P", ONE.address, b"\x1f\x90"): Volume(5, 6, 7, 8)}
    StoredTotals(str(tmp_path / "state")).write("one", totals.of, counts, alive)
    found = StoredTotals(str(tmp_path / "state")).read(1.0)
    assert found == Stored("one", totals.of, list(counts), alive)
    assert found.totals[WEB].endpoints[ONE].volume == Volume(1, 2, 3, 11)


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
    return _Series(SERVICE_CONNECTIONS, ("default", name, "", "TCP", "forwarded"), value)


def shown(chosen: list[_Series]) -> dict[str, int]:
    return {one.labels[1]: one.value for one in chosen}


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
