"""Any order of events and failures leaves the kernel as a start with the final objects does."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import cidrs, endpoint, endpoint_slice, service, service_name
from kproxy_core.contract.errors import SyncFailed, TrustLost
from kproxy_core.model.address import Family
from kproxy_core.model.events import (
    Complete,
    Event,
    NodeGone,
    NodeSet,
    ServiceCidrSet,
    ServiceGone,
    ServiceSet,
    SliceGone,
    SliceSet,
)
from kproxy_core.model.node import NodeObject
from kproxy_core.model.service import ServicePortKey, SliceName
from kproxy_core.plan.service_plan import ServicePlan
from tests.core.loop_rig import V4, V6, Rig
from tests.core.metric_values import values

NAMES = ["a/one", "a/two", "b/one"]
SLICES = ["s", "t"]

endpoints = st.builds(
    endpoint,
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.10"]),
    st.sampled_from(["node1", "node2"]),
    ready=st.booleans(),
    serving=st.booleans(),
    terminating=st.booleans(),
    zones=st.sampled_from(["", "z1", "z2"]),
)
events = st.one_of(
    st.builds(
        lambda name, created, ips, external, ports, local: ServiceSet(
            service(name, *ports, ip=ips, created=created, external_ips=external, internal_local=local)
        ),
        st.sampled_from(NAMES),
        st.sampled_from(["", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]),
        st.sampled_from(["10.96.0.1", "10.96.0.2", "10.96.0.2 fd00:96::1", "fd00:96::1"]),
        st.sampled_from(["", "10.96.0.1", "192.0.2.1 2001:db8::1"]),
        st.lists(st.sampled_from(["x:80@30000", "y:81", "u:53/UDP"]), min_size=1, max_size=3, unique=True),
        st.booleans(),
    ),
    st.builds(ServiceGone, st.sampled_from(NAMES).map(service_name)),
    st.builds(
        lambda name, piece, found: SliceSet(
            endpoint_slice(name, *found, name=piece, ports=["x:8080", "u:53/UDP"])
        ),
        st.sampled_from(NAMES),
        st.sampled_from(SLICES),
        st.lists(endpoints, max_size=3),
    ),
    st.builds(
        lambda name, piece: SliceSet(endpoint_slice(name, "fd00::1", name=piece, ports=["x:8080"])),
        st.sampled_from(NAMES),
        st.sampled_from(SLICES),
    ),
    st.builds(SliceGone, st.builds(SliceName, st.sampled_from("ab"), st.sampled_from(SLICES))),
    st.builds(lambda zone: NodeSet(NodeObject("node1", zone=zone)), st.sampled_from(["z1", "z2"])),
    st.just(NodeGone()),
    st.builds(ServiceCidrSet, st.just("kubernetes"), st.sampled_from([(), cidrs("10.96.0.0/12")])),
)
problems = st.one_of(
    st.none(), st.builds(SyncFailed), st.builds(TrustLost), st.builds(lambda: ValueError("a bug"))
)


def from_scratch(history: list[Event]) -> Rig:
    """Return the result of a start with the final objects."""
    rig = Rig()
    rig.start(*history)
    return rig


def held(rig: Rig) -> Mapping[Family, Mapping[ServicePortKey, ServicePlan]]:
    return {family: dict(rig.backend.held[family]) for family in (V4, V6)}


@given(st.lists(st.lists(events, max_size=5), max_size=8), st.integers(0, 8))
def test_any_batching_ends_where_a_start_with_the_final_objects_would(
    batches: list[list[Event]], complete_after: int
) -> None:
    rig = Rig(min_interval=0.5)
    for number, batch in enumerate(batches):
        if number == complete_after:
            rig.say(Complete("test"))
        rig.say(*batch)
        rig.clock.now += 0.1
    rig.say(Complete("test"))
    rig.settle()
    fresh = from_scratch([event for batch in batches for event in batch])
    assert held(rig) == held(fresh)
    assert rig.backend.nodes == fresh.backend.nodes


@given(st.lists(st.tuples(st.lists(events, max_size=3), problems, problems, st.booleans()), max_size=10))
def test_no_change_is_lost_after_any_failure(
    steps: list[tuple[list[Event], Exception | None, Exception | None, bool]]
) -> None:
    rig = Rig()
    rig.start()
    for batch, first, second, damage in steps:
        rig.backend.problems = [first, second]
        if damage:
            rig.backend.held[V4].clear()
            assert rig.backend.damaged is not None
            rig.backend.damaged(V4, "flushed")
        rig.say(*batch)
        rig.clock.now += 0.05
    rig.backend.problems = []
    rig.settle()
    fresh = from_scratch([event for batch, *_ in steps for event in batch])
    assert held(rig) == held(fresh)
    assert rig.backend.nodes == fresh.backend.nodes
    assert rig.health.healthy()
    for sync in (rig, fresh):
        sync.flows_deleted()
    gauges = [name for name in values(fresh.metrics) if "no_local_endpoints" in name]
    assert {name: rig.value(name) for name in gauges} == {name: fresh.value(name) for name in gauges}
