"""Events fold into a state that does not depend on their order."""

from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kproxy_conformance.builders import cidrs, endpoint, endpoint_slice, service, service_name
from kproxy_core.kube import store as kube_store
from kproxy_core.kube.store import Store
from kproxy_core.model.address import Cidr, Family, outermost, parse_address
from kproxy_core.model.events import (
    BadObject,
    Complete,
    Event,
    NodeGone,
    NodeSet,
    ServiceCidrGone,
    ServiceCidrSet,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
)
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import EndpointSlice, ServiceName, SliceName

V4, V6 = Family.IPV4, Family.IPV6
WEB, OTHER = service_name("web"), service_name("other")
STARTED = 1000.0


def store_with(*events: Event, families: Sequence[Family] = (V4, V6)) -> Store:
    store = Store(families, kinds=("services", "slices"), started=STARTED)
    for event in events:
        store.fold(event)
    return store


def settled(*events: Event) -> Store:
    """A store whose changes up to now were taken."""
    store = store_with(*events)
    for family in (V4, V6):
        store.families[family].take_changed()
    return store


def changed(store: Store) -> dict[Family, set[ServiceName]]:
    return {family: set(store.families[family].take_changed()) for family in (V4, V6)}


def test_it_is_complete_once_every_source_is() -> None:
    store = store_with(Complete("slices"), Complete("somebody else's"))
    assert (store.complete, store.missing) == (False, {"services"})
    store.fold(Complete("services"))
    assert store.complete


def test_a_service_changes_both_families_and_a_slice_its_own() -> None:
    assert changed(store_with(ServiceSet(service("web")))) == {V4: {WEB}, V6: {WEB}}
    assert changed(store_with(SliceSet(endpoint_slice("web", "10.0.0.1")))) == {V4: {WEB}, V6: set()}
    assert changed(store_with(SliceSet(endpoint_slice("web", "fd00::1")))) == {V4: set(), V6: {WEB}}


def test_changes_are_returned_once() -> None:
    store = settled(ServiceSet(service("web")))
    assert changed(store) == {V4: set(), V6: set()}


@pytest.mark.parametrize(
    "again",
    [
        ServiceSet(service("web")),
        SliceSet(endpoint_slice("web", "10.0.0.1"), trigger_time=2000.0),
        ServiceGone(OTHER),
        SliceGone(SliceName("default", "other-1")),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_without_a_difference_changes_nothing(again: Event) -> None:
    store = settled(ServiceSet(service("web")), SliceSet(endpoint_slice("web", "10.0.0.1")))
    store.fold(again)
    assert changed(store) == {V4: set(), V6: set()}


def test_a_slice_that_moves_to_another_service_changes_both() -> None:
    store = settled(SliceSet(endpoint_slice("web", "10.0.0.1", name="s")))
    store.fold(SliceSet(endpoint_slice("other", "10.0.0.1", name="s")))
    assert changed(store)[V4] == {WEB, OTHER}
    assert WEB not in store.families[V4].slices
    assert list(store.families[V4].slices[OTHER]) == ["s"]


def test_a_slice_that_changes_its_family_changes_both() -> None:
    store = settled(SliceSet(endpoint_slice("web", "10.0.0.1", name="s")))
    store.fold(SliceSet(endpoint_slice("web", "fd00::1", name="s")))
    assert changed(store) == {V4: {WEB}, V6: {WEB}}
    assert WEB not in store.families[V4].slices
    assert list(store.families[V6].slices[WEB]) == ["s"]


def test_slices_of_a_family_that_the_node_lacks_are_not_kept() -> None:
    store = store_with(SliceSet(endpoint_slice("web", "10.0.0.1", name="s")), families=[V4])
    store.families[V4].take_changed()
    store.fold(SliceSet(endpoint_slice("web", "fd00::1", name="t")))
    store.fold(SliceSet(endpoint_slice("web", "fd00::1", name="s")))
    store.fold(SliceGone(SliceName("default", "t")))
    assert WEB not in store.families[V4].slices
    assert set(store.families[V4].take_changed()) == {WEB}


def test_the_node_object_is_kept_when_it_is_deleted() -> None:
    node = NodeObject("node1", zone="a")
    store = store_with(NodeSet(node), NodeGone())
    assert store.node == node


def test_a_node_registered_again_keeps_its_addresses_until_it_has_others() -> None:
    node = NodeObject("node1", addresses=(parse_address("192.0.2.1"),), pod_cidrs=cidrs("10.244.1.0/24"))
    store = store_with(NodeSet(node), NodeGone(), NodeSet(NodeObject("node1", zone="b")))
    assert store.node == replace(node, zone="b")
    moved = replace(node, addresses=(parse_address("192.0.2.2"),), pod_cidrs=cidrs("10.244.2.0/24"))
    store.fold(NodeSet(moved))
    assert store.node == moved


def test_disallowed_external_ips_are_dropped() -> None:
    store = Store([V4], kinds=[], started=STARTED, external_ips=False)
    store.fold(ServiceSet(service("web", external_ips="192.0.2.1")))
    assert store.services[WEB] == service("web")


@pytest.mark.parametrize(("default", "own", "seconds"), [
    (0, None, 0), (0, 10, 10), (30, None, 30), (30, 10, 10), (30, 0, 0),
])
def test_a_service_has_the_last_resort_of_the_node_or_its_own(
    default: float, own: float | None, seconds: float
) -> None:
    store = Store([V4], kinds=[], started=STARTED, last_resort=default)
    assert store.last_resort(WEB) == 0
    store.fold(ServiceSet(service("web", last_resort=own)))
    assert store.last_resort(WEB) == seconds
    store.fold(SliceSet(endpoint_slice("web", "10.0.0.1")), 1.0)
    store.fold(SliceSet(endpoint_slice("web", endpoint("10.0.0.1", ready=False))), 2.0)
    remembered = {parse_address("10.0.0.1"): 2.0}
    assert {name: lost.endpoints for name, lost in store.families[V4].lost.items()} == (
        {WEB: remembered} if seconds else {})


def test_what_was_ready_is_forgotten_with_its_slice_or_its_service() -> None:
    down = SliceSet(endpoint_slice("web", endpoint("10.0.0.1", ready=False)))
    for last in (
        SliceGone(SliceName("default", "web-1")), ServiceGone(WEB), ServiceSet(service("web")),
        SliceSet(replace(down.slice, service=OTHER)),
    ):
        store = store_with(ServiceSet(service("web", last_resort=30)),
                           SliceSet(endpoint_slice("web", "10.0.0.1")), down)
        assert list(store.families[V4].lost) == [WEB]
        store.fold(last)
        assert store.families[V4].lost == {}


def test_a_service_network_is_kept_while_any_object_has_it() -> None:
    store = store_with(ServiceCidrSet("one", cidrs("10.96.0.0/12")))
    for event, joined in (
        (ServiceCidrSet("two", cidrs("10.96.0.0/12 10.0.0.0/24")), "10.0.0.0/24 10.96.0.0/12"),
        (ServiceCidrGone("one"), "10.0.0.0/24 10.96.0.0/12"),
        (ServiceCidrGone("one"), "10.0.0.0/24 10.96.0.0/12"),
        (ServiceCidrSet("two", cidrs("10.0.0.0/24")), "10.0.0.0/24"),
        (ServiceCidrGone("two"), ""),
    ):
        store.fold(event)
        assert store.service_cidrs == cidrs(joined)


def test_of_service_networks_that_overlap_the_widest_is_kept() -> None:
    store = store_with(ServiceCidrSet("one", cidrs("10.96.8.0/24 fd00::/108 10.96.0.0/20")),
                       ServiceCidrSet("two", cidrs("10.96.4.0/22 a00:1::/32 10.96.0.0/16")))
    assert store.service_cidrs == cidrs("10.96.0.0/16 a00:1::/32 fd00::/108")
    store.fold(ServiceCidrGone("two"))
    assert store.service_cidrs == cidrs("10.96.0.0/20 fd00::/108")


def test_service_networks_are_joined_once_for_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    joins = 0

    def join(given: Iterable[Cidr]) -> tuple[Cidr, ...]:
        nonlocal joins
        joins += 1
        return outermost(given)

    monkeypatch.setattr(kube_store, "outermost", join)
    store = store_with(*(ServiceCidrSet(f"range-{at}", cidrs(f"10.0.{at}.0/24")) for at in range(100)))
    assert len(store.service_cidrs) == len(store.service_cidrs) == 100
    assert joins == 1


def test_trigger_times_since_the_start_are_returned_once() -> None:
    store = store_with(
        SliceSet(endpoint_slice("web", "10.0.0.1", name="s"), trigger_time=999.0),
        SliceSet(endpoint_slice("web", "10.0.0.2", name="s"), trigger_time=1001.0),
        SliceSet(endpoint_slice("web", "10.0.0.3", name="s"), trigger_time=1002.0),
        SliceSet(endpoint_slice("other", "10.0.0.3", name="t"), trigger_time=1003.0),
    )
    assert sorted(store.families[V4].take_trigger_times()) == [1001.0, 1002.0, 1003.0]
    assert store.families[V4].take_trigger_times() == []


def test_a_deleted_slice_drops_the_trigger_times_of_its_service() -> None:
    store = store_with(
        SliceSet(endpoint_slice("web", "10.0.0.1", name="s"), trigger_time=1001.0),
        SliceSet(endpoint_slice("web", "10.0.0.2", name="t")),
        SliceGone(SliceName("default", "t")),
    )
    assert store.families[V4].take_trigger_times() == []


def test_events_are_counted_as_kube_proxy_counts_them() -> None:
    same = SliceSet(endpoint_slice("web", "10.0.0.1"))
    store = store_with(ServiceSet(service("web")), same, same, BadObject("Service", "a/b", "", "bad"))
    assert store.service_changes == 2, "one for each family"
    assert store.endpoint_changes == 2, "whether or not it changed something"
    of_family = store.families[V4]
    assert (of_family.pending_services, of_family.pending_slices) == (1, 1)
    changed(store)
    assert (of_family.pending_services, of_family.pending_slices) == (0, 0)


Snapshot = tuple[Mapping[ServiceName, object], list[Mapping[str, EndpointSlice] | None]]
NAMES = [WEB, OTHER]


def snapshot(store: Store) -> Snapshot:
    slices = [store.families[family].slices for family in (V4, V6)]
    return dict(store.services), [of_family.get(name) for of_family in slices for name in NAMES]


events = st.one_of(
    st.builds(lambda n, a: ServiceSet(service(n, affinity=a)), st.sampled_from(["web", "other"]),
              st.integers(0, 1)),
    st.builds(ServiceGone, st.sampled_from(NAMES)),
    st.builds(
        lambda n, s, a: SliceSet(endpoint_slice(n, a, name=s)),
        st.sampled_from(["web", "other"]), st.sampled_from("st"),
        st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1"]),
    ),
    st.builds(lambda s: SliceGone(SliceName("default", s)), st.sampled_from("st")),
)


def identity(event: Event) -> object:
    match event:
        case ServiceSet(found):
            return found.name
        case ServiceGone(name):
            return name
        case SliceSet(piece):
            return piece.name
        case SliceGone(slice_name):
            return slice_name
    raise AssertionError(event)


@given(st.lists(events, max_size=20), st.randoms(use_true_random=False))
def test_only_the_last_event_for_each_object_matters(history: list[Event], random: object) -> None:
    last = list({identity(event): event for event in history}.values())
    random.shuffle(last)  # type: ignore[attr-defined]
    assert snapshot(store_with(*history)) == snapshot(store_with(*last))


@given(st.lists(events, max_size=20))
def test_every_changed_service_is_returned(history: list[Event]) -> None:
    store = store_with()
    before = snapshot(store)
    for event in history:
        store.fold(event)
        after = snapshot(store)
        named = changed(store)
        for name in NAMES:
            if before[0].get(name) != after[0].get(name):
                assert name in named[V4]
                assert name in named[V6]
        for (family, name), old, new in zip(
            [(family, name) for family in (V4, V6) for name in NAMES], before[1], after[1], strict=True
        ):
            assert old == new or name in named[family]
        before = (after[0], [dict(s) if s is not None else None for s in after[1]])
