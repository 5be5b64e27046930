"""The switch of many nodes as a plan: which move, in which order, when it stops, and what is said then."""

from collections import deque
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.fleet.switch import (
    FAILED,
    Advice,
    Condition,
    Found,
    Move,
    Rollout,
    State,
    advice,
    configurations,
    lasting,
    to_move,
    to_move_back,
    worse,
)

WELL = Condition(failures={})
WEB = {"10.0.0.1:80/TCP of default/web": "no connection of 1 was answered (hung)"}
DNS = {"10.0.0.2:53/TCP of kube-system/dns": "endpoint 10.1.0.2:53: 1 of 3 connections refused"}
NO_FRONTEND = Condition(unclear="no Service has a TCP frontend here")


@pytest.mark.parametrize(("before", "after", "reasons"), [
    (WELL, WELL, ()),
    (WELL, Condition(failures=WEB), (
        "10.0.0.1:80/TCP of default/web: no connection of 1 was answered (hung)",)),
    (Condition(failures=WEB), Condition(failures=WEB), ()),
    (Condition(failures=WEB), WELL, ()),
    (Condition(failures=WEB), Condition(failures=WEB | DNS), (
        "10.0.0.2:53/TCP of kube-system/dns: endpoint 10.1.0.2:53: 1 of 3 connections refused",)),
    (WELL, Condition(failures={}, problems=("IPv4: no memory",)), ("IPv4: no memory",)),
    (Condition(failures={}, problems=("IPv4: no memory",)),
     Condition(failures={}, problems=("IPv4: still no memory",)), ()),
    (NO_FRONTEND, NO_FRONTEND, ()),
    (NO_FRONTEND, Condition(failures=WEB), (
        "10.0.0.1:80/TCP of default/web: no connection of 1 was answered (hung)",)),
    (WELL, Condition(unclear="cannot be read"), ("cannot be read",)),
])  # fmt: skip
def test_a_node_is_worse_by_what_failed_only_after_the_switch(
    before: Condition, after: Condition, reasons: tuple[str, ...]
) -> None:
    assert worse(before, after) == reasons


@pytest.mark.parametrize(("first", "second", "counts"), [
    (Condition(failures=WEB), WELL, {}),
    (Condition(failures=WEB), Condition(failures=WEB | DNS), WEB),
    (Condition(failures=DNS), Condition(failures=WEB), {}),
    (Condition(failures=DNS), NO_FRONTEND, None),
])  # fmt: skip
def test_a_failure_counts_if_it_lasts(
    first: Condition, second: Condition, counts: Mapping[str, str] | None
) -> None:
    assert lasting(first, second).failures == counts


@pytest.mark.parametrize(("found", "goal", "state"), [
    (Found(node="a", mode="old", configured="old"), "new", State.WAITING),
    (Found(node="a", mode="new", configured="old"), "new", State.THERE),
    (Found(node="a", mode="third", configured="old"), "new", State.WAITING),
    (Found(node="a", unreached="no pod of kproxy"), "new", State.UNREACHED),
])  # fmt: skip
def test_nodes_that_serve_in_the_mode_stay(found: Found, goal: str, state: State) -> None:
    node = to_move(found, "new")
    assert (node.goal, node.state) == (goal, state)


@pytest.mark.parametrize(("found", "goal", "state"), [
    (Found(node="a", mode="new", before="old", configured="old"), "old", State.WAITING),
    (Found(node="a", mode="new", before="third", configured="old"), "third", State.WAITING),
    (Found(node="a", mode="new", before="old", configured="new"), "old", State.WAITING),
    (Found(node="a", mode="new", before="old"), "old", State.WAITING),
    (Found(node="a", mode="new", configured="old"), "new", State.THERE),
    (Found(node="a", mode="new", configured="new"), "new", State.THERE),
    (Found(node="a", mode="new"), "new", State.THERE),
    (Found(node="a", mode="old", before="new", configured="old"), "old", State.THERE),
    (Found(node="a", unreached="no pod of kproxy"), "", State.UNREACHED),
])  # fmt: skip
def test_the_way_back_is_to_the_mode_before(found: Found, goal: str, state: State) -> None:
    node = to_move_back(found, "new")
    assert (node.goal, node.state) == (goal, state)


def rollout(*states: State, at_a_time: int = 1) -> Rollout:
    return Rollout(at_a_time=at_a_time, moves=tuple(
        Move(name=f"node{number}", serves="old", goal="new", configured="old", state=state)
        for number, state in enumerate(states, 1)))


W, U, M, T = State.WAITING, State.UNDER_WAY, State.MOVED, State.THERE


@pytest.mark.parametrize(("states", "at_a_time", "following"), [
    ((W, W, W), 1, ("node1",)),
    ((W, W, W), 2, ("node1", "node2")),
    ((U, W, W), 1, ()),
    ((U, W, W), 2, ("node2",)),
    ((T, M, W), 1, ("node3",)),
    ((State.UNREACHED, W), 1, ("node2",)),
    ((T, M), 5, ()),
    *(((M, failed, W), 2, ()) for failed in FAILED),
])  # fmt: skip
def test_nodes_begin_as_others_end(
    states: Sequence[State], at_a_time: int, following: tuple[str, ...]
) -> None:
    now = rollout(*states, at_a_time=at_a_time)
    assert tuple(move.name for move in now.following()) == following


def test_no_node_begins_after_an_interrupt() -> None:
    interrupted = rollout(U, W, at_a_time=2).interrupt()
    assert interrupted.following() == ()
    assert not interrupted.is_over
    assert interrupted.end("node1", M).is_over


def test_a_node_that_moved_with_problems_is_not_well() -> None:
    begun = rollout(W).begin("node1")
    assert begun.end("node1", M).is_well
    assert not begun.end("node1", M, ["IPv4: no memory"]).is_well


ON, BACK = Advice("to go on", "on"), Advice("to go back", "back")


@pytest.mark.parametrize(("states", "expected"), [
    ((T, M, M), ()),
    ((M, State.WORSE, W), (ON, BACK)),
    ((M, State.WORSE), (BACK,)),
    ((State.REFUSED, W), (ON,)),
    ((M, State.REFUSED, W), (ON, BACK)),
    ((State.LOST,), (ON, BACK)),
    ((M, State.UNREACHED), (ON,)),
])  # fmt: skip
def test_the_operator_gets_the_commands_that_help(
    states: Sequence[State], expected: tuple[Advice, ...]
) -> None:
    assert advice(rollout(*states), "on", "back") == expected
    assert advice(rollout(*states), "on", "") == tuple(one for one in expected if one is ON)


def test_configurations_that_name_another_mode_are_grouped() -> None:
    nodes = [
        Move(name="a", serves="old", goal="new", configured="old", state=M),
        Move(name="b", serves="new", goal="new", configured="old", state=T),
        Move(name="c", serves="new", goal="new", configured="new", state=T),
        Move(name="d", serves="old", goal="new", configured="", state=State.WORSE),
        Move(name="e", serves="old", goal="new", configured="old", state=State.REFUSED),
        Move(name="f", serves="old", goal="new", configured="old", state=W),
        Move(name="g", serves="new", goal="new", configured="old", label="mode", state=T),
    ]
    assert list(configurations(Rollout(moves=tuple(nodes), at_a_time=1))) == [
        ("old", "new", ("a", "b")), ("", "new", ("d",))]


ENDS = st.sampled_from([State.MOVED, State.MOVED, State.MOVED, *FAILED])


@given(states=st.lists(st.sampled_from([W, W, T, State.UNREACHED]), max_size=12),
       at_a_time=st.integers(1, 4), data=st.data())
def test_whatever_happens_few_are_under_way_and_none_begins_after_a_failure(
    states: list[State], at_a_time: int, data: st.DataObject
) -> None:
    now = rollout(*states, at_a_time=at_a_time)
    waiting = {node.name for node in now.of(W)}
    begun: list[str] = []
    under_way: deque[str] = deque()
    stopped = False
    while not now.is_over:
        for move in now.following():
            assert not stopped, "a node begins after a failure or an interrupt"
            now = now.begin(move.name)
            begun.append(move.name)
            under_way.append(move.name)
        assert len(under_way) <= at_a_time
        if data.draw(st.integers(0, 9), "interrupt at 0") == 0:
            now, stopped = now.interrupt(), True
        under_way.rotate(data.draw(st.integers(0, 3), "which ends"))
        if under_way:
            state = data.draw(ENDS, "its end")
            now = now.end(under_way.popleft(), state)
            stopped = stopped or state in FAILED
    assert len(begun) == len(set(begun)), "a node begins twice"
    assert set(begun) <= waiting
    assert stopped or set(begun) == waiting
    assert not under_way
    assert {node.name for node in now.of(W)} == waiting - set(begun)
    assert {node.state for node in now.moves} <= {W, M, T, State.UNREACHED, *FAILED}
