"""Failures, windows and leaks: the verdicts of a soak."""

import pytest

from tests.soak.ledger import Ledger, Window, leaks
from tests.soak.proxy import Usage
from tests.switch.room import Failure

USAGE = Usage(rss=50 << 20, files=("pipe",) * 36, connections=4, threads=13, children=0)


def damage(seconds: float, pressure: float = 0.4) -> Window:
    return Window("nftables", "flush ruleset", 10.0, 10.0 + seconds, True, is_noticed=True, pressure=pressure)


@pytest.mark.parametrize(("since", "until", "allowed"), [
    (9.0, 9.9, False), (9.0, 10.0, True), (10.1, 12.0, True), (10.3, 10.4, False),
])  # fmt: skip
def test_a_connection_may_fail_if_it_was_under_way_during_damage(
    since: float, until: float, allowed: bool
) -> None:
    failure = Failure(since, until, False, "new tcp")
    assert Ledger([damage(0.2)]).outside([failure]) == ([] if allowed else [failure])


def test_connections_may_not_fail_when_nothing_was_damaged() -> None:
    window = Window("nftables", "SIGTERM", 10.0, 12.0, may_fail=False)
    failure = Failure(11.0, 11.1, False, "new tcp")
    assert Ledger([window]).outside([failure]) == [failure]


@pytest.mark.parametrize(("windows", "slow"), [
    ([damage(0.2)], 0),
    ([damage(0.5, pressure=0.4)], 1),
    ([damage(0.5, pressure=0.6)], 0),
    ([damage(0.4, pressure=0.4)], 0),
    ([damage(0.1)] * 99 + [damage(0.5)], 0),
    ([damage(0.1)] * 98 + [damage(0.5)] * 2, 2),
])  # fmt: skip
def test_one_of_a_hundred_repairs_may_be_slow_while_the_machine_has_time(
    windows: list[Window], slow: int
) -> None:
    assert len(Ledger(windows).slow()) == slow


@pytest.mark.parametrize(("last", "grown"), [
    (USAGE, []), (USAGE._replace(rss=56 << 20), []), (USAGE._replace(rss=57 << 20), ["rss"]),
    (USAGE._replace(files=(*USAGE.files, "udp")), ["descriptors"]),
    (USAGE._replace(connections=8), []), (USAGE._replace(connections=9), ["connections"]),
    (USAGE._replace(threads=14, children=1), ["threads", "children"]),
])  # fmt: skip
def test_leaks_are_what_is_more_than_after_the_second_lap(last: Usage, grown: list[str]) -> None:
    first = USAGE._replace(rss=30 << 20)
    more = USAGE._replace(rss=90 << 20, files=("pipe",) * 50, connections=20)
    found = leaks([first, USAGE, more, last, last], growth=0.05, slack=4 << 20)
    assert [line.split()[0] for line in found] == grown
    assert [line.rpartition(" by ")[2] for line in found if line.startswith("desc")] == [
        "udp" for name in grown if name == "descriptors"]
    assert not leaks([first, USAGE, last, USAGE], growth=0.05, slack=4 << 20)
    found = leaks([first, USAGE, USAGE, last], growth=0.05, slack=4 << 20)
    assert [line.split()[0] for line in found] == [name for name in grown if name != "rss"]


def test_the_report_shows_each_event_by_mode() -> None:
    windows = [
        damage(0.2), damage(0.1), Window("ebpf", "switch to nftables", 20.0, 21.0, may_fail=False),
    ]  # fmt: skip
    failures = [Failure(10.05, 10.06, False, "new tcp"), Failure(10.02, 10.03, False, "new udp")]
    assert Ledger(windows).event_tables(failures).splitlines() == [
        "| damage | nftables | ebpf |",
        "| --- | --- | --- |",
        "| flush ruleset | 200, 200 (2) |  |",
        "",
        "| event | nftables | ebpf |",
        "| --- | --- | --- |",
        "| switch to another mode |  | 1000, 1000 (1) |",
        "",
        "| failures | nftables | ebpf |",
        "| --- | --- | --- |",
        "| flush ruleset | 2, 50 |  |",
    ]
