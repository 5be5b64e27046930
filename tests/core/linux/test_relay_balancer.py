"""The choice of an endpoint for a client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.linux.relay.balancer import Balancer, Clients
from kproxy_core.linux.relay.orders import Endpoint
from kproxy_core.model.address import parse_address
from kproxy_core.plan.hashing import slot_of

A, B, C = ("10.0.0.1", 80), ("10.0.0.2", 80), ("10.0.0.3", 80)


def balancer(*endpoints: Endpoint, affinity: Clients | None = None) -> Balancer:
    made = Balancer(lambda _: None)
    made.set_endpoints(endpoints, affinity)
    return made


def test_endpoints_take_turns() -> None:
    one = balancer(A, B, C)
    assert [one.choose("x", 0.0) for _ in range(4)] == [A, B, C, A]


def test_without_endpoints_none_is_chosen() -> None:
    assert balancer().choose("x", 0.0) is None


def test_a_client_keeps_its_endpoint_until_it_is_absent_for_the_timeout() -> None:
    one = balancer(A, B, affinity=Clients(10))
    assert [one.choose("x", at) for at in (0.0, 9.0, 18.0)] == [A, A, A]
    assert one.choose("x", 28.0) == B


def test_an_endpoint_that_does_not_answer_is_replaced_for_good() -> None:
    one = balancer(A, B, affinity=Clients(10))
    assert one.choose("x", 0.0) == A
    assert one.choose("x", 0.0, is_retry=True) == B
    assert one.choose("x", 1.0) == B


def test_only_clients_of_a_removed_endpoint_lose_it() -> None:
    affinity = Clients(10)
    one = balancer(A, B, C, affinity=affinity)
    kept = {client: one.choose(client, 0.0) for client in "xyz"}
    assert one.set_endpoints([B, C], affinity) == [A]
    assert [one.choose(client, 1.0) for client in "yz"] == [kept["y"], kept["z"]]
    assert one.choose("x", 1.0) in (B, C)


def test_the_timeout_of_the_service_is_followed() -> None:
    affinity = Clients(100)
    one = balancer(A, B, affinity=affinity)
    assert one.choose("x", 0.0) == A
    affinity.seconds = 5
    assert one.choose("x", 6.0) == B


def test_a_client_has_the_same_endpoint_at_each_relay_that_shares_its_memory() -> None:
    affinity = Clients(10)
    one, other = balancer(A, B, C, affinity=affinity), balancer(B, C, affinity=affinity)
    assert [one.choose(client, 0.0) for client in "xyz"] == [A, B, C]
    assert [other.choose(client, 0.0) for client in "zy"] == [C, B]
    assert other.choose("x", 0.0) == one.choose("x", 0.0) == B


def test_a_relay_that_closes_leaves_the_memory_to_others() -> None:
    affinity = Clients(10)
    one, other = balancer(A, B, affinity=affinity), balancer(A, B, affinity=affinity)
    assert [one.choose(client, 0.0) for client in "xy"] == [A, B]
    assert one.set_endpoints([], None) == [A, B]
    assert [other.choose(client, 0.0) for client in "yx"] == [B, A]


def test_an_endpoint_takes_as_many_turns_as_it_has_slots() -> None:
    one = balancer(A, A, A, B)
    chosen = [one.choose("x", 0.0) for _ in range(40)]
    assert (chosen.count(A), chosen.count(B)) == (30, 10)
    assert one.set_endpoints([A, B], None) == []
    assert [one.choose("x", 0.0) for _ in range(4)] == [A, B, A, B]


def test_an_endpoint_of_weight_zero_is_not_chosen_and_not_removed_before_it_is_gone() -> None:
    one = balancer(A, B, affinity=Clients(10))
    assert one.choose("x", 0.0) == A
    assert one.set_endpoints([B], Clients(10), [A]) == []
    assert [one.choose("x", 1.0) for _ in range(2)] == [B, B]
    assert one.set_endpoints([B], Clients(10)) == [A]


@pytest.mark.parametrize("client", ["10.1.1.1", "fd00::1", "fe80::1%eth0"])
def test_a_hash_of_the_client_chooses(client: str) -> None:
    one = Balancer(lambda _: pytest.fail("slots have an order"))
    slots = [A, B, C] * 7
    one.set_endpoints(slots, None, (), "client")
    address = parse_address(client.partition("%")[0])
    assert one.choose(client, 0.0, port=7) == slots[slot_of(address, None, 21)]
    assert one.choose(client, 0.0, port=8) == one.choose(client, 9.0, port=7)
    one.set_endpoints(slots, None, (), "flow")
    assert [one.choose(client, 0.0, port=port) for port in range(50)] == [
        slots[slot_of(address, port, 21)] for port in range(50)]
    assert {one.choose(client, 0.0, port=7, is_retry=True) for _ in range(3)} == {A, B, C}


ENDPOINTS = st.lists(st.sampled_from([A, B, C]), unique=True)
STEPS = st.lists(st.tuples(ENDPOINTS, st.sampled_from("xyz"), st.integers(0, 20)), max_size=30)


@given(STEPS, st.integers(0, 5))
def test_removed_endpoints_are_not_chosen(
    steps: list[tuple[list[Endpoint], str, int]], seconds: int
) -> None:
    affinity = Clients(seconds) if seconds else None
    one = balancer(affinity=affinity)
    now = 0.0
    for endpoints, client, passed in steps:
        before = set(one.endpoints)
        assert set(one.set_endpoints(endpoints, affinity)) == before - set(endpoints)
        now += passed
        if affinity is not None:
            affinity.forget_expired(now)
        chosen = one.choose(client, now)
        assert chosen in endpoints if endpoints else chosen is None
