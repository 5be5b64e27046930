"""The difference between the maps and what is wanted."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ebpf import names
from kproxy_ebpf.applied import Applied, Contents, Difference, compare, contents
from kproxy_ebpf.batch import endpoint_key_of_slot, id_family, parse_service, service_id, slot_key

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
V4 = Family.IPV4
WEB = ServicePortKey("default", "web", "", next(iter(plans(NODE, service()))).protocol)


class Maps:
    """The kernel's maps, as a dictionary. Every slot has an endpoint that exists."""

    def __init__(self) -> None:
        self.contents: Contents = {name: {} for name in (names.FRONTENDS, names.SLOTS, names.ENDPOINTS)}

    def run(self, difference: Difference) -> None:
        self._delete(difference.withdrawn)
        for name, elements in difference.updates.items():
            self.contents[name] |= elements
        self._delete(difference.unused)
        in_slots = {endpoint_key_of_slot(*slot) for slot in self.contents[names.SLOTS].items()}
        assert self.contents[names.ENDPOINTS].keys() <= in_slots

    def _delete(self, part: Contents) -> None:
        for name, elements in part.items():
            for key in elements:
                del self.contents[name][key]


def planned(
    name: str, ends: frozenset[int], *, local: bool, affinity: int, first: int | None = None
) -> dict[ServicePortKey, ServicePlan]:
    number = int(name[1:])
    endpoints = [endpoint(f"10.244.{1 + n % 2}.{n}", f"node{1 + n % 2}") for n in sorted(ends)]
    return plans(
        NODE,
        service(
            name, f"80@{30000 + number}", ip=f"10.96.0.{number}", internal_local=local, affinity=affinity
        ),
        *([endpoint_slice(name, *endpoints[1:], family=V4),
           endpoint_slice(name, endpoints[0], name="first", weight=first)] if endpoints else []),
    )


SERVICES = st.dictionaries(
    st.sampled_from(["s1", "s2", "s3"]),
    st.tuples(st.frozensets(st.integers(1, 9)), st.booleans(), st.sampled_from([0, 60]),
              st.sampled_from([None, None, 0, 1, 300])),
)
World = dict[str, tuple[frozenset[int], bool, int, int | None]]


def all_plans(world: World) -> dict[ServicePortKey, ServicePlan]:
    found: dict[ServicePortKey, ServicePlan] = {}
    for name, (ends, local, affinity, first) in world.items():
        found |= planned(name, ends, local=local, affinity=affinity, first=first)
    return found


def changes(
    before: Mapping[ServicePortKey, ServicePlan], after: Mapping[ServicePortKey, ServicePlan]
) -> dict[ServicePortKey, ServicePlan | None]:
    return {key: after.get(key) for key in {*before, *after} if before.get(key) != after.get(key)}


@given(st.lists(SERVICES, max_size=6))
def test_changes_one_by_one_end_where_a_fresh_start_ends(worlds: list[World]) -> None:
    maps, applied = Maps(), Applied()
    known: dict[ServicePortKey, ServicePlan] = {}
    for world in worlds:
        wanted = all_plans(world)
        changed = changes(known, wanted)
        maps.run(applied.difference(changed))
        applied.acknowledge(changed)
        known = wanted
    assert maps.contents == contents(known.values())


@given(SERVICES, SERVICES)
def test_a_resync_repairs_whatever_the_maps_hold(before: World, after: World) -> None:
    maps, wanted = Maps(), contents(all_plans(after).values())
    maps.run(compare({}, contents(all_plans(before).values())))
    maps.run(compare(maps.contents, wanted))
    assert maps.contents == wanted
    assert compare(maps.contents, wanted).operations == 0


@given(SERVICES)
def test_every_frontend_leads_to_as_many_slots_as_it_says(world: World) -> None:
    found = contents(all_plans(world).values())
    for value in found[names.FRONTENDS].values():
        service = parse_service(value)
        assert all(slot_key(service.identity, n) in found[names.SLOTS] for n in range(service.endpoints))
        slots = {value for key, value in found[names.SLOTS].items() if key.startswith(service.identity)}
        remembered = [key for key in found[names.ENDPOINTS] if key.endswith(service.identity)]
        assert len(remembered) == (len(slots) if service.affinity_seconds else 0)


def test_endpoints_that_move_to_other_slots_are_never_withdrawn() -> None:
    applied = Applied(planned("s1", frozenset({2, 4, 6}), local=False, affinity=60))
    found = applied.difference(planned("s1", frozenset({4, 6}), local=False, affinity=60))
    assert [len(found.withdrawn[name]) for name in (names.FRONTENDS, names.ENDPOINTS)] == [0, 1]
    assert found.updates[names.ENDPOINTS] == {}


def test_nothing_is_remembered_before_the_kernel_has_acknowledged() -> None:
    applied, wanted = Applied(), planned("s1", frozenset({2}), local=False, affinity=0)
    assert applied.difference(wanted) == applied.difference(wanted)
    applied.acknowledge(wanted)
    assert applied.difference(wanted).operations == 0


def test_ids_of_the_families_never_meet() -> None:
    ids = {family: {service_id(f"s{number}", family) for number in range(1000)} for family in Family}
    for family, found in ids.items():
        assert {id_family(one) for one in found} == {family}
        assert len(found) == 1000
