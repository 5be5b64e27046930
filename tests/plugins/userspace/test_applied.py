"""Acknowledged relays and portals, and the difference to the wanted ones."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.address import Protocol, parse_address
from kproxy_core.model.service import ServicePortKey
from kproxy_userspace import applied as state
from kproxy_userspace.applied import Applied, Relay, RelayedFlows
from kproxy_userspace.wanted import Portal, Redirect, RelayName, Wanted

KEYS = [ServicePortKey("shop", name, "", Protocol.TCP) for name in "abc"]
VIPS = [parse_address(f"10.96.0.{number}") for number in range(1, 5)]
REDIRECTS = [Redirect(Portal(Protocol.TCP, vip, 80, "shop/a"), port) for vip in VIPS for port in (1, 2)]

portals = st.dictionaries(st.sampled_from(KEYS), st.frozensets(st.sampled_from(REDIRECTS), max_size=4))


def relay(key: ServicePortKey, number: int, *, alone: bool = False) -> Relay:
    wanted = Wanted(key.protocol, (("10.0.0.1", 8080),), 0, ())
    return Relay(number, RelayName(key, alone=alone), 40000 + number, wanted, number)


Steps = list[dict[ServicePortKey, frozenset[Redirect]]]


@given(st.lists(portals))
def test_a_kernel_that_applies_the_differences_holds_the_wanted_portals(steps: Steps) -> None:
    applied = Applied()
    kernel: Counter[Redirect] = Counter()
    wanted: dict[ServicePortKey, frozenset[Redirect]] = {}
    for step in steps:
        before = dict(applied.portals)
        difference = applied.difference(step)
        after = applied.portals_after(step)
        assert applied.portals == before
        assert Counter(difference.deletes) <= kernel
        kernel += Counter(difference.adds)
        kernel -= Counter(difference.deletes)
        applied.acknowledge(step)
        wanted |= step
        assert applied.portals == {key: redirects for key, redirects in wanted.items() if redirects}
        assert Counter(applied.all_portals()) == kernel == Counter(after)


@given(portals, portals)
def test_many_new_portals_are_added_in_parts(
    held: dict[ServicePortKey, frozenset[Redirect]], wanted: dict[ServicePortKey, frozenset[Redirect]]
) -> None:
    applied = Applied()
    applied.acknowledge(held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "MOST_ADDED", 1)
        for _ in range(len(REDIRECTS) + 1):
            before = dict(applied.portals)
            part = applied.part(wanted)
            deletes, adds = applied.difference(part)
            assert len(adds) <= len(wanted) or {each.portal for each in deletes} & {
                each.portal for each in adds}
            applied.acknowledge(part)
            for key in wanted:
                served = {each.portal for each in wanted[key] & before.get(key, frozenset())}
                assert served <= {each.portal for each in applied.portals.get(key, ())}
    assert all(applied.portals.get(key, frozenset()) == wanted[key] for key in wanted)


def test_relays_that_are_not_wanted_are_surplus_until_closed() -> None:
    applied, old, new, other = Applied(), relay(KEYS[0], 1), relay(KEYS[0], 2, alone=True), relay(KEYS[1], 3)
    applied.acknowledge_relays([old, new, other])
    assert applied.surplus({KEYS[0]: {new.name}}) == [old]
    applied.acknowledge_closed([old], {old: 1.0})
    assert applied.surplus({KEYS[0]: {new.name}}) == []
    assert applied.all_relays() == [new, other, old]
    applied.acknowledge_departed([old])
    assert applied.all_relays() == [new, other]
    applied.acknowledge_closed([new, other], {})
    assert applied.relays == {}


def test_flows_of_udp_portals_are_stale_only_if_a_relay_answers_them() -> None:
    udp = Redirect(Portal(Protocol.UDP, VIPS[0], 53, "shop/dns"), 40001)
    here, elsewhere = parse_address("192.0.2.1"), parse_address("10.1.0.5")
    flows = RelayedFlows.of([udp, REDIRECTS[0]], frozenset([here]))
    assert (set(flows.ports), set(flows.relays)) == ({53}, {40001})
    assert flows.is_stale((VIPS[0], 53), (here, 40001))
    assert not flows.is_stale((VIPS[0], 53), (here, 40002))
    assert not flows.is_stale((here, 40001), (here, 40001))
    assert not flows.is_stale((VIPS[0], 53), (elsewhere, 40001)), "another mode's flow to an endpoint"
