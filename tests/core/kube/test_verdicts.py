"""Checks change a verdict by two results in a row, and never leave out the last endpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import destinations
from kproxy_core.kube.verdicts import Verdict, left_out, patience
from kproxy_core.model.service import Destination


@pytest.mark.parametrize(("results", "verdicts"), [
    # Each result, + or -, and the verdict after it.
    ("+", "+"),
    ("-", "-"),
    ("+-", "++"),
    ("+--", "++-"),
    ("+-+-+-", "++++++"),
    ("-+", "--"),
    ("-++", "--+"),
    ("--+-+", "-----"),
    ("+--++--", "++--++-"),
])
def test_two_results_in_a_row_change_a_verdict_and_the_first_makes_it(results: str, verdicts: str) -> None:
    verdict, found = Verdict(), ""
    for result in results:
        verdict = verdict.after(success=result == "+")
        found += "-" if verdict.fails else "+"
    assert found == verdicts


@pytest.mark.parametrize(("results", "seconds"), [
    ("+", 2), ("+-", 0.5), ("+--", 2), ("+--+", 0.5), ("+-+", 2),
])
def test_a_surprise_is_confirmed_soon(results: str, seconds: float) -> None:
    verdict = Verdict()
    for result in results:
        verdict = verdict.after(success=result == "+")
    assert verdict.next_in(2) == seconds


@pytest.mark.parametrize(("every", "seconds"), [(0.1, 0.1), (1, 1), (60, 1)])
def test_an_answer_is_awaited_for_a_second_or_until_the_next_check(every: float, seconds: float) -> None:
    assert patience(every) == seconds


A, B, C = destinations("10.0.0.1:80 10.0.0.2:80 10.0.0.3:80")


@pytest.mark.parametrize(("weights", "failing", "out"), [
    ({A: None, B: None}, [], set()),
    ({A: None, B: None}, [A], {A}),
    ({A: None, B: None}, [A, B], {A}),
    ({A: None, B: None}, [B, A], {B}),
    ({A: None}, [A], set()),
    ({A: 1, B: 2, C: 0}, [A, B], {A}),
    ({A: 1, B: 2, C: 0}, [A, B, C], {A, C}),
    ({A: 1, B: 2, C: 0}, [C], {C}),
    ({A: None}, [B], set()),
])
def test_the_last_one_stays(
    weights: dict[Destination, int | None], failing: list[Destination], out: set[Destination]
) -> None:
    assert left_out(weights, failing) == out


@given(
    weights=st.dictionaries(
        st.sampled_from([A, B, C]), st.sampled_from([None, 0, 1, 100]), min_size=1,
    ).filter(lambda weights: any(weight != 0 for weight in weights.values())),
    failing=st.permutations([A, B, C]).flatmap(lambda order: st.integers(0, 3).map(lambda n: order[:n])),
)  # fmt: skip
def test_some_endpoint_with_a_weight_is_always_used(
    weights: dict[Destination, int | None], failing: list[Destination]
) -> None:
    out = left_out(weights, failing)
    used = [where for where, weight in weights.items() if weight != 0 and where not in out]
    assert used
    assert out <= set(failing) & set(weights)
    if any(where not in failing for where in used):
        assert out == set(failing) & set(weights)
