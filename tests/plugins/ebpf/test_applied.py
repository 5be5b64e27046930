"""The difference between the maps and what is wanted."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.testing.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_ebpf import names
from kproxy_ebpf.applied import Applied, Contents, Difference, recover

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
V4 = Family.IPV4
WEB = ServicePortKey("default", "web", "", next(iter(plans(NODE, service()))).protocol)


class Maps:
    """The kernel's maps, as a dictionary."""

    def __init__(self) -> None:
        self.contents: Contents = {name: {} for name in (names.FRONTENDS, names.SLOTS, names.ENDPOINTS)}

    def run(self, difference: Difference) -> None:
        for part in (difference.withdrawn, difference.unused):
            for name, elements in part.items():
                for key in elements:
                    del self.contents[name][key]
        for name, elements in difference.updates.items():
            self.contents[name] |= elements

    def reachable(self) -> dict[bytes, list[bytes]]:
        """The endpoints (without ids) behind each frontend, as a program would find them."""
        found = {}
        for key, value in self.contents[names.FRONTENDS].items():
            service_id, count = value[:4], int.from_bytes(value[4:8], "little")
            slots = [service_id + n.to_bytes(4, "little") for n in range(count)]
            values = [self.contents[names.ENDPOINTS][self.contents[names.SLOTS][slot]] for slot in slots]
            assert all(endpoint[-4:] == service_id for endpoint in values)
            found[key] = sorted(endpoint[:-4] for endpoint in values)
        return found


def planned(
    name: str, ends: frozenset[int], *, local: bool, affinity: int
) -> dict[ServicePortKey, ServicePlan]:
    number = int(name[1:])
    endpoints = [endpoint(f"10.244.{1 + n % 2}.{n}", f"node{1 + n % 2}") for n in sorted(ends)]
    return plans(
        NODE,
        service(
            name, f"80@{30000 + number}", ip=f"10.96.0.{number}", internal_local=local, affinity=affinity
        ),
        *([endpoint_slice(name, *endpoints)] if endpoints else []),
    )


SERVICES = st.dictionaries(
    st.sampled_from(["s1", "s2", "s3"]),
    st.tuples(st.frozensets(st.integers(1, 9)), st.booleans(), st.sampled_from([0, 60])),
)
World = dict[str, tuple[frozenset[int], bool, int]]


def all_plans(world: World) -> dict[ServicePortKey, ServicePlan]:
    found: dict[ServicePortKey, ServicePlan] = {}
    for name, (ends, local, affinity) in world.items():
        found |= planned(name, ends, local=local, affinity=affinity)
    return found


def changes(
    before: Mapping[ServicePortKey, ServicePlan], after: Mapping[ServicePortKey, ServicePlan]
) -> dict[ServicePortKey, ServicePlan | None]:
    return {key: after.get(key) for key in {*before, *after} if before.get(key) != after.get(key)}


@given(st.lists(SERVICES, max_size=6))
def test_changes_one_by_one_end_where_a_fresh_start_ends(worlds: list[World]) -> None:
    maps, applied = Maps(), Applied(V4)
    known: dict[ServicePortKey, ServicePlan] = {}
    for world in worlds:
        wanted = all_plans(world)
        difference = applied.difference(changes(known, wanted))
        maps.run(difference)
        applied.acknowledge(difference)
        known = wanted
    fresh = Maps()
    fresh.run(recover(V4, known, {}))
    assert maps.reachable() == fresh.reachable()
    assert [len(elements) for elements in maps.contents.values()] == [
        len(elements) for elements in fresh.contents.values()
    ]


@given(SERVICES, SERVICES)
def test_a_resync_repairs_whatever_the_maps_hold(before: World, after: World) -> None:
    maps = Maps()
    maps.run(recover(V4, all_plans(before), {}))
    maps.run(recover(V4, all_plans(after), maps.contents))
    fresh = Maps()
    fresh.run(recover(V4, all_plans(after), {}))
    assert maps.reachable() == fresh.reachable()
    assert recover(V4, all_plans(after), maps.contents).operations == 0


@given(SERVICES)
def test_a_restart_writes_nothing(world: World) -> None:
    maps = Maps()
    maps.run(recover(V4, all_plans(world), {}))
    assert recover(V4, all_plans(world), maps.contents).operations == 0


def test_an_endpoint_keeps_its_id_while_others_leave() -> None:
    applied = Applied(V4)
    first = applied.difference(planned("s1", frozenset({2, 4, 6}), local=False, affinity=60))
    applied.acknowledge(first)
    second = applied.difference(planned("s1", frozenset({4, 6}), local=False, affinity=60))
    gone = second.withdrawn[names.ENDPOINTS]
    assert len(gone) == 1
    assert names.ENDPOINTS not in second.updates
    assert set(first.updates[names.ENDPOINTS]) - set(gone) == {
        value
        for value in (first.updates[names.SLOTS] | second.updates[names.SLOTS]).values()
        if value not in gone
    }


def test_nothing_is_remembered_before_the_kernel_has_acknowledged() -> None:
    applied = Applied(V4)
    wanted = planned("s1", frozenset({2}), local=False, affinity=0)
    assert applied.difference(wanted) == applied.difference(wanted)
    applied.acknowledge(applied.difference(wanted))
    assert applied.difference(wanted).operations == 0


def test_ids_of_the_families_never_meet() -> None:
    v4, v6 = Applied(Family.IPV4), Applied(Family.IPV6)
    node6 = node_view("node1", family=Family.IPV6, pods="fd00::/64")
    one = v4.difference(planned("s1", frozenset({2}), local=False, affinity=0))
    other = v6.difference(plans(node6, service(ip="fd00:96::1"), endpoint_slice("web", "fd00::5")))
    for name in (names.FRONTENDS, names.SLOTS, names.ENDPOINTS):
        assert not set(one.updates[name]) & set(other.updates[name])
