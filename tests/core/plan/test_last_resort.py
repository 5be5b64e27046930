"""The endpoints that a Service uses although none is ready, and for how long."""

import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice
from kproxy_core.model.address import parse_address
from kproxy_core.model.readiness import LostReadiness
from kproxy_core.model.service import Endpoint
from kproxy_core.plan.last_resort import LastResort, as_ready, find_last_resort

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
DOWN = [endpoint(address, ready=False) for address in (A, B)]
SERVING = endpoint(C, ready=False, serving=True, terminating=True)
TERMINATING = endpoint(C, ready=False, terminating=True)

CASES: dict[str, tuple[list[Endpoint], dict[str, float], float | None, float, set[str]]] = {
    # endpoints, when each became unready, since when none is ready, now: those that are used
    "all at once": (DOWN, {A: 100, B: 100}, 100, 100, {A, B}),
    "one after the other": (DOWN, {A: 95.1, B: 100}, 100, 100, {A, B}),
    "one long before": (DOWN, {A: 95, B: 100}, 100, 100, {B}),
    "all long before the last ready one left": (DOWN, {A: 90, B: 90}, 100, 100, set()),
    "just before the end": (DOWN, {A: 100, B: 100}, 100, 129.9, {A, B}),
    "at the end": (DOWN, {A: 100, B: 100}, 100, 130, set()),
    "one is ready": (DOWN, {A: 100, B: 100}, None, 100, set()),
    "one never was ready": (DOWN, {A: 100}, 100, 100, {A}),
    "a terminating one still serves": ([*DOWN, SERVING], {A: 100, B: 100}, 100, 100, set()),
    "a terminating one does not": ([*DOWN, TERMINATING], {A: 100, B: 100}, 100, 100, {A, B}),
    "scaled to zero": ([], {}, 100, 100, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_endpoints_that_were_ready_last_are_used(name: str) -> None:
    endpoints, lost, none_since, now, used = CASES[name]
    found = find_last_resort(
        {"web-1": endpoint_slice("web", *endpoints)},
        LostReadiness({parse_address(address): at for address, at in lost.items()}, none_since), 30, now)
    assert found == (LastResort(100, 130, frozenset(map(parse_address, used))) if used else None)


def test_they_count_as_ready_and_other_slices_are_the_same() -> None:
    slices = {"a": endpoint_slice("web", *DOWN, name="a"), "b": endpoint_slice("web", SERVING, name="b")}
    found = as_ready(slices, {parse_address(A)})
    assert [each.ready for each in found["a"].endpoints] == [True, False]
    assert found["b"] is slices["b"]
