"""The choice of an endpoint for a client."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy_userspace.names import Endpoint
from kproxy_userspace.worker.balancer import Balancer

A, B, C = ("10.0.0.1", 80), ("10.0.0.2", 80), ("10.0.0.3", 80)


def balancer(*endpoints: Endpoint, affinity: int = 0) -> Balancer:
    made = Balancer(lambda _: None)
    made.set_endpoints(endpoints, affinity)
    return made


def test_endpoints_take_turns() -> None:
    one = balancer(A, B, C)
    assert [one.choose("x", 0.0) for _ in range(4)] == [A, B, C, A]


def test_without_endpoints_none_is_chosen() -> None:
    assert balancer().choose("x", 0.0) is None


def test_a_client_keeps_its_endpoint_until_it_is_absent_for_the_timeout() -> None:
    one = balancer(A, B, affinity=10)
    assert [one.choose("x", at) for at in (0.0, 9.0, 18.0)] == [A, A, A]
    assert one.choose("x", 28.0) == B


def test_an_endpoint_that_does_not_answer_is_replaced_for_good() -> None:
    one = balancer(A, B, affinity=10)
    assert one.choose("x", 0.0) == A
    assert one.choose("x", 0.0, is_retry=True) == B
    assert one.choose("x", 1.0) == B


def test_only_clients_of_a_removed_endpoint_lose_it() -> None:
    one = balancer(A, B, C, affinity=10)
    kept = {client: one.choose(client, 0.0) for client in "xyz"}
    assert one.set_endpoints([B, C], 10) == [A]
    assert [one.choose(client, 1.0) for client in "yz"] == [kept["y"], kept["z"]]
    assert one.choose("x", 1.0) in (B, C)


def test_the_timeout_of_the_service_is_followed() -> None:
    one = balancer(A, B, affinity=100)
    assert one.choose("x", 0.0) == A
    one.set_endpoints([A, B], 5)
    assert one.choose("x", 6.0) == B


ENDPOINTS = st.lists(st.sampled_from([A, B, C]), unique=True)
STEPS = st.lists(st.tuples(ENDPOINTS, st.sampled_from("xyz"), st.integers(0, 20)), max_size=30)


@given(STEPS, st.integers(0, 5))
def test_removed_endpoints_are_not_chosen(
    steps: list[tuple[list[Endpoint], str, int]], affinity: int
) -> None:
    one = balancer(affinity=affinity)
    now = 0.0
    for endpoints, client, passed in steps:
        before = set(one.endpoints)
        assert set(one.set_endpoints(endpoints, affinity)) == before - set(endpoints)
        now += passed
        one.forget_expired(now)
        chosen = one.choose(client, now)
        assert chosen in endpoints if endpoints else chosen is None
