"""The judge of silent endpoints, on a simulated node: who is put into quarantine, and that all come back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_conformance.builders import destinations, endpoint, endpoint_slice, node_view, port_spec
from kproxy_core.model.address import Address
from kproxy_core.model.service import Destination
from kproxy_core.plan.endpoints import categorize, endpoints_of
from kproxy_core.plan.quarantine import LONGEST_TERM, Answer, Answers, Attempt, Judge, Sentence

pytestmark = pytest.mark.pure

TICK = 0.025
"""Seconds."""
HERE = "here"
A, B, C, D = FOUR = destinations("10.1.0.1:80 10.1.0.2:80 10.1.0.3:80 10.1.0.4:80")

Answering = Callable[[float, int], bool]
"""Whether an endpoint answers at a time, to the attempt of that number."""


def always(now: float, number: int) -> bool:
    return True


def never(now: float, number: int) -> bool:
    return False


def dark(since: float, until: float) -> Answering:
    return lambda now, number: not since <= now < until


@dataclass
class Node:
    """A node from which clients connect to endpoints of one Service, in turn."""

    endpoints: Mapping[Destination, Answering]
    local: Sequence[Destination] = ()
    rate: float = 200.0
    clients: int = 5
    patience: float = 3.0
    """Seconds after which clients give up."""
    each: float = 1.0
    """Seconds between looks while there is nothing to follow."""
    most: int = 1000
    """Connections read at a time."""
    made: int = 0
    lost: list[float] = field(default_factory=list)
    """Times of attempts that were not answered at once."""
    shut: dict[Destination, list[tuple[float, float]]] = field(default_factory=dict)
    """When each endpoint was in quarantine."""

    def __post_init__(self) -> None:
        self._judge = Judge()
        self._step = 0
        self._ids = (number.to_bytes(4, "big") for number in count())
        self._waiting: dict[Attempt, int] = {}
        """The step at which each began. The kernel forgets them later than the simulation."""
        self._answers: list[Answer] = []
        self._quarantined: Mapping[Destination, Sentence] = {}

    @property
    def chosen(self) -> tuple[Destination, ...]:
        piece = endpoint_slice("web", *(
            endpoint(".".join(map(str, where.address)), HERE if where in self.local else "other")
            for where in self.endpoints), ports=["80"])  # fmt: skip
        return categorize(endpoints_of(port_spec("80"), {"": piece}), node_view(HERE), use_cluster=True,
                          use_local=False, quarantined=self._quarantined).cluster  # fmt: skip

    def run(self, seconds: float) -> "Node":
        look_at, credit = 0.0, 0.0
        ends_at: float | None = None
        chosen = self.chosen
        for step in range(round(seconds / TICK)):
            self._step, now = step, step * TICK
            credit += self.rate * TICK
            while credit >= 1:
                credit -= 1
                self._connect(now, chosen[self.made % len(chosen)])
            self._retry(step)
            if now >= look_at:
                self._look(now)
                look_at = min(self._judge.next_look(now) or now + self.each, now + self.each)
                ends_at = self._judge.next_end(now)
                chosen = self.chosen
            elif ends_at is not None and now >= ends_at:
                self._follow(now)
                ends_at, chosen = None, self.chosen
        for spans in self.shut.values():
            spans[:] = [(since, min(until, seconds)) for since, until in spans]
        return self

    def _connect(self, now: float, to: Destination) -> None:
        client = Address(bytes([10, 2, 0, self.made % self.clients]))
        self.made += 1
        attempt = Attempt(next(self._ids), client, to)
        if self.endpoints[to](now, self.made):
            self._answers.append(Answer(attempt.id, to))
        else:
            self._waiting[attempt] = self._step
            self.lost.append(now)

    def _retry(self, step: int) -> None:
        """Have clients that have not given up repeat their SYN, each second."""
        for attempt, began in list(self._waiting.items()):
            age = step - began
            if 0 < age < self.patience / TICK and age % round(1 / TICK) == 0 and (
                self.endpoints[attempt.endpoint](step * TICK, self.made)
            ):
                del self._waiting[attempt]
                self._answers.append(Answer(attempt.id, attempt.endpoint))

    def _look(self, now: float) -> None:
        waiting = sorted(self._waiting, key=lambda one: crc32(one.id))
        wanted = self._judge.look(now, waiting[:self.most], self.endpoints)

        def read(answers: list[Answer]) -> Answers:
            listed = sorted(answers, key=lambda one: crc32(one.id))
            return Answers(listed[:self.most], len(listed) < self.most)

        if wanted.endpoints:
            self._judge.hear(
                now, {where: read([one for one in self._answers if one.endpoint == where])
                      for where in wanted.endpoints},
                read(self._answers) if wanted.of_any else None, [where.address for where in self.local])
        self._follow(now)

    def _follow(self, now: float) -> None:
        found = self._judge.quarantined(now)
        for where in found.keys() - self._quarantined.keys():
            self.shut.setdefault(where, []).append((now, float("inf")))
        for where in self._quarantined.keys() - found.keys():
            since, _ = self.shut[where][-1]
            self.shut[where][-1] = since, now
        self._quarantined = found

    def lost_share(self, since: float, until: float) -> float:
        made = (until - since) * self.rate
        return sum(since <= at < until for at in self.lost) / made


def of(behaviour: Mapping[Destination, Answering]) -> dict[Destination, Answering]:
    return {**dict.fromkeys(FOUR, always), **behaviour}


@pytest.mark.parametrize("begins", [1.0, 1.3, 1.62, 1.97])
@pytest.mark.parametrize("patience", [1.5, 3.0, 30.0])
def test_one_of_four_that_goes_dark_loses_few_connections_and_is_chosen_again(
    begins: float, patience: float
) -> None:
    back = begins + 12
    node = Node(of({C: dark(begins, back)}), patience=patience).run(back + 10)
    assert list(node.shut) == [C]
    assert node.lost_share(begins + 3, back) < 0.01
    assert all(until < back + 10 for _, until in node.shut[C]), "it is chosen again"
    assert node.lost_share(back, back + 10) == 0


@pytest.mark.parametrize("rate", [4.0, 20.0, 400.0])
def test_an_endpoint_that_stays_dark_is_tried_for_moments_only(rate: float) -> None:
    node = Node(of({C: never}), rate=rate).run(120)
    spans = node.shut[C]
    assert all(until - since < LONGEST_TERM + 3 for since, until in spans)
    assert sum(until - since for since, until in spans) > 0.75 * (120 - spans[0][0])


def test_the_first_answered_attempt_ends_it() -> None:
    node = Node(of({C: dark(1.0, 4.0)}), patience=30).run(20)
    ((since, until),) = node.shut[C]
    assert since < 4
    assert until < 6, "clients repeat their SYN each second"


@pytest.mark.parametrize("node", [
    pytest.param(Node(of({C: never}), clients=1), id="one client alone"),
    pytest.param(Node(dict.fromkeys(FOUR, never)), id="nobody answers"),
    pytest.param(Node(of({C: never, D: never}), local=[A, B]), id="the network is away"),
    pytest.param(Node(of({C: lambda now, number: number % 10 == 0})), id="one that answers some"),
    pytest.param(Node(dict.fromkeys(FOUR, lambda now, number: number % 50 == 0), rate=500.0),
                 id="a flood that is not answered"),
    pytest.param(Node({A: never}), id="the only one"),
])  # fmt: skip
def test_quarantine_is_not_for(node: Node) -> None:
    assert not node.run(15).shut


def test_an_endpoint_on_this_node_needs_no_answer_from_another_one() -> None:
    assert list(Node(of({C: never}), local=FOUR).run(5).shut) == [C]


def test_a_large_table_delays_quarantine_by_the_time_between_two_looks() -> None:
    node = Node(of({C: dark(3.0, 20.0)}), each=4.0).run(30)
    assert 3 < node.shut[C][0][0] < 3 + 4 + 2
    assert all(until < 30 for _, until in node.shut[C])


def test_a_part_of_the_table_is_enough() -> None:
    """More connections wait, or were answered, than are read at a time."""
    node = Node(of({C: dark(4.0, 16.0)}), rate=1000.0, most=200).run(26)
    assert list(node.shut) == [C]
    assert node.shut[C][0][0] < 7
    assert all(until < 26 for _, until in node.shut[C])


@pytest.mark.parametrize(("before", "after", "complete", "new"), [
    ("", "a", True, "a"),
    ("ab", "axb", True, "x"),
    ("ab", "bc", True, "c"),
    ("ab", "axb", False, "x"),
    ("ab", "bc", False, ""),
    ("", "a", False, ""),
])  # fmt: skip
def test_answers_are_new_only_within_the_part_that_both_readings_cover(
    before: str, after: str, complete: bool, new: str
) -> None:
    def reading(names: str) -> Answers:
        return Answers([Answer(name.encode(), A) for name in names], complete)

    assert "".join(one.id.decode() for one in reading(after).new_since(reading(before))) == new


@given(
    silent=st.lists(st.tuples(st.sampled_from(FOUR[1:]), st.integers(0, 20), st.integers(1, 30)), max_size=4),
    number=st.integers(1, 4), rate=st.sampled_from([3.0, 50.0]), patience=st.sampled_from([1.5, 8.0]),
)
@settings(max_examples=25, deadline=None)
def test_never_more_than_half_never_the_last_and_it_always_ends(
    silent: list[tuple[Destination, int, int]], number: int, rate: float, patience: float
) -> None:
    def answers(where: Destination) -> Answering:
        spans = [(since, since + seconds) for other, since, seconds in silent if other == where]
        return lambda now, number: not any(since <= now < until for since, until in spans)

    seen: set[int] = set()

    class Watched(Node):
        def _look(self, now: float) -> None:
            super()._look(now)
            seen.add(len(self.chosen))

    node = Watched({where: answers(where) for where in FOUR[:number]}, rate=rate, patience=patience).run(70)
    assert min(seen) >= max(1, number - number // 2)
    assert A not in node.shut, "it answers always"
    assert all(until - since < LONGEST_TERM + 4 for spans in node.shut.values() for since, until in spans)
    assert all(until < 70 for spans in node.shut.values() for _, until in spans), "all answer since 50 s"
