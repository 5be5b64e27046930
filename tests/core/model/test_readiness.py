"""Endpoints that were ready: remembered while they are listed, are not ready again and do not terminate."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import endpoint, endpoint_slice
from kproxy_core.model.readiness import LostReadiness
from kproxy_core.model.service import EndpointSlice

READY, UNREADY, LEAVING, ABSENT = "ready", "unready", "leaving", "absent"
STATES = st.sampled_from([READY, UNREADY, LEAVING, ABSENT])
HOSTS = 3

steps = st.lists(st.tuples(st.sampled_from("ab"), st.lists(STATES, min_size=HOSTS, max_size=HOSTS)))
"""The name of a slice, and the state of each host in it."""


def made(name: str, states: list[str]) -> EndpointSlice | None:
    """Return a slice; None if no host is in it."""
    endpoints = [
        endpoint(f"10.0.0.{host}", ready=state == READY, terminating=state == LEAVING)
        for host, state in enumerate(states) if state != ABSENT
    ]
    return endpoint_slice("web", *endpoints, name=name) if endpoints else None


@given(steps)
def test_what_is_remembered_is_what_a_look_at_everything_after_each_step_gives(
    steps: list[tuple[str, list[str]]],
) -> None:
    lost = LostReadiness()
    slices: dict[str, EndpointSlice] = {}
    expected: dict[int, float] = {}
    none_since: float | None = None
    states: dict[str, list[str]] = {}
    for now, (name, of_hosts) in enumerate(steps):
        before, after = slices.pop(name, None), made(name, of_hosts)
        if after is not None:
            slices[name] = after
        lost.follow(before, after, slices.values(), float(now))

        was_ready = any(READY in each for each in states.values())
        for host in range(HOSTS):
            ceased = states.get(name, [ABSENT] * HOSTS)[host] == READY and of_hosts[host] != READY
            all_now = {each[host] for each in {**states, name: of_hosts}.values()} - {ABSENT}
            if all_now != {UNREADY}:
                expected.pop(host, None)
            elif ceased:
                expected[host] = now
        states[name] = of_hosts
        if any(READY in each for each in states.values()):
            none_since = None
        elif was_ready:
            none_since = now
        assert {address[3]: at for address, at in lost.endpoints.items()} == expected
        if lost.endpoints:
            assert lost.none_since == none_since
