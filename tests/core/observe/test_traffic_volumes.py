"""Bytes and packets of ended and of living connections: what was added since the last reading."""

from hypothesis import example, given
from hypothesis import strategies as st

from kproxy_core.linux.conntrack_volumes import NatBinding, Volume
from kproxy_core.model.address import Address, Family
from kproxy_core.observe.traffic.tracked import Growth

WAY = NatBinding(Family.IPV4, 6, Address(bytes(4)), b"\0P", Address(bytes([10, 1, 0, 1])), b"\x1f\x90")


def volume(number: int) -> Volume:
    return Volume(number, 100 * number, number, 50 * number)


def told(growth: Growth, ended: int, alive: int) -> int:
    """Return the packets that a reading adds."""
    sums = [{WAY: volume(number)} if number else {} for number in (ended, alive)]
    found = dict(growth.add(*sums))
    assert not found or found == {WAY: volume(found[WAY].packets_to_endpoint)}
    return found[WAY].packets_to_endpoint if found else 0


def test_only_what_is_new_is_told() -> None:
    growth = Growth({WAY: volume(7)})
    assert [told(growth, *sums) for sums in ((0, 7), (0, 9), (10, 0), (0, 0))] == [0, 2, 1, 0]


def test_a_connection_that_ends_during_a_reading_is_told_once() -> None:
    growth = Growth({})
    assert [told(growth, *sums) for sums in ((0, 5), (0, 0), (6, 0))] == [5, 0, 1]


def test_an_end_that_the_kernel_did_not_report_withholds_no_later_ones() -> None:
    growth = Growth({})
    assert [told(growth, *sums) for sums in ((0, 5), (0, 0), (0, 0), (3, 0))] == [5, 0, 0, 3]


@example([(2, 0, "lives"), (0, 0, "races"), (0, 0, "races")])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from(["lives", "ends", "races"]))))
def test_nothing_is_lost_or_told_twice(steps: list[tuple[int, int, str]]) -> None:
    """Each step opens connections, adds packets to the oldest, and may end it, reported a reading later."""
    growth, alive, made, found, late = Growth({}), list[int](), 0, 0, 0
    for opened, packets, end in steps:
        alive += [1] * opened
        made += opened
        ended, late = late, 0
        if alive:
            alive[0] += packets
            made += packets
            if end == "ends":
                ended += alive.pop(0)
            elif end == "races":
                late = alive.pop(0)
        found += told(growth, ended, sum(alive))
        assert found <= made
    assert found + told(growth, late, sum(alive)) == made
