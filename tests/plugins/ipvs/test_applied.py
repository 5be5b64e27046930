"""Operations that a change needs, and the acknowledged state, which only an acknowledgement moves."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.service import Service, ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_ipvs import applied as state
from kproxy_ipvs import names
from kproxy_ipvs.applied import Applied, Difference, HeldServer, compare
from kproxy_ipvs.batch import DeleteDestination, PutDestination, PutServer
from kproxy_ipvs.wanted import HASH_FALLBACK, HASH_PORT, PERSISTENT, Scheduling, ServerKey, Style, wanted

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", ip="192.0.2.1")
STYLE = Style(
    family=Family.IPV4, scheduler="rr", node_ip=NODE.node_ip,
    node_port_addresses=NODE.node_port_addresses, masquerade_bit=14,
)  # fmt: skip
Changed = dict[ServicePortKey, ServicePlan | None]

VARIANTS: list[dict[str, object]] = [
    {},
    {"external_ips": "198.51.100.1"},
    {"external_ips": "198.51.100.1", "external_local": True},
    {"load_balancer_ips": "203.0.113.1", "source_ranges": "192.0.2.0/24", "affinity": 60},
    {"internal_local": True},
    {"hash_by": "client", "external_ips": "198.51.100.1", "external_local": True, "affinity": 60},
    {"hash_by": "flow"},
]


def planned(
    name: str, *pods: str, variant: int = 0, port: str = "80", ip: str = "10.96.0.1",
    first: int | None = None,
) -> Changed:
    """The plan of a Service; the first pod has the weight *first*."""
    svc: Service = service(name, port, ip=ip, **VARIANTS[variant])  # type: ignore[arg-type]
    where = [endpoint(f"10.244.{pod}", f"node{pod[0]}") for pod in pods]
    target = "8080/UDP" if "UDP" in port else "8080"
    ports = [target]
    return dict(plans(
        NODE, svc, endpoint_slice(name, *where[1:], ports=ports),
        *([endpoint_slice(name, where[0], ports=ports, name=f"{name}-2", weight=first)] if where else [])))


def deleted(name: str) -> Changed:
    return dict.fromkeys(planned(name))


def applied(*parts: Changed) -> Applied:
    """The state once the kernel holds *parts*, one change after another."""
    found = Applied()
    for part in parts:
        found.acknowledge(found.difference(part, STYLE))
    return found


BEFORE = planned("web", "1.5", "2.5")
CHANGES: list[tuple[str, Changed, dict[str, int]]] = [
    ("nothing", BEFORE, {}),
    ("new endpoint", planned("web", "1.5", "2.5", "2.6"), {"servers": 1}),
    ("removed endpoint", planned("web", "1.5"), {"servers": 1, "draining": 1}),
    ("external IP", planned("web", "1.5", "2.5", variant=1),
     {"servers": 3, "added_entries": 2, "added_addresses": 1}),
    ("deleted", deleted("web"),
     {"deleted_servers": 1, "deleted_entries": 3, "deleted_addresses": 1}),
    ("second service port with the same ClusterIP and hairpin", planned("other", "1.5", port="81"),
     {"servers": 2, "added_entries": 1}),
    ("persistence", planned("web", "1.5", "2.5", variant=3),
     {"servers": 4, "added_entries": 6, "added_addresses": 1}),
    ("weights: another scheduler, another weight", planned("web", "1.5", "2.5", first=50), {"servers": 2}),
    ("weight 0", planned("web", "1.5", "2.5", first=0), {"servers": 1, "deleted_entries": 1}),
    ("a hash: another scheduler", planned("web", "1.5", "2.5", variant=5),
     {"servers": 6, "added_entries": 3, "added_addresses": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("configured", "variant", "first", "missing", "scheduling", "weights"), [
    ("rr", 0, None, "", Scheduling("rr"), [1, 1]),
    ("rr", 0, 50, "", Scheduling("wrr"), [1, 2]),
    ("lc", 0, 50, "", Scheduling("wlc"), [1, 2]),
    ("sed", 0, 50, "", Scheduling("sed"), [1, 2]),
    ("rr", 0, 50, "wrr", Scheduling("rr"), [1, 2]),
    ("rr", 0, 0, "", Scheduling("rr"), [0, 1]),
    ("sh", 0, 50, "", Scheduling("sh", HASH_FALLBACK), [1, 2]),
    ("rr", 6, None, "", Scheduling("mh", HASH_FALLBACK | HASH_PORT), [1, 1]),
    ("rr", 6, 50, "mh", Scheduling("sh", HASH_FALLBACK | HASH_PORT), [1, 2]),
    ("rr", 5, None, "", Scheduling("mh", HASH_FALLBACK | PERSISTENT, 60), [1, 1]),
])
def test_scheduling_by_weights_or_hash(
    configured: str, variant: int, first: int | None, missing: str, scheduling: Scheduling, weights: list[int]
) -> None:
    (plan,) = planned("web", "1.5", "2.5", variant=variant, first=first).values()
    assert plan is not None
    style = replace(STYLE, scheduler=configured, missing=frozenset(missing.split()))
    server = wanted(plan, style, 0).servers[ServerKey(Family.IPV4, 0, plan.cluster_ip, 6, 80)]
    assert server.scheduling == scheduling
    assert [weight for _, weight in sorted(server.real_servers.items())] == weights


def test_a_real_server_of_weight_zero_is_not_drained_until_it_is_removed() -> None:
    held = applied(planned("web", "1.5", "2.5"), planned("web", "1.5", "2.5", first=0))
    difference = held.difference(planned("web", "2.5"), STYLE)
    assert [where.port for _, where in difference.draining] == [8080]
    assert difference.servers == []


@pytest.mark.parametrize(("changed", "counts"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_operations_of_a_change(changed: Changed, counts: dict[str, int]) -> None:
    assert applied(BEFORE).difference(changed, STYLE).counts == counts


@pytest.mark.parametrize("changed", [row[1] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_failed_write_leaves_the_state_as_it_was(changed: Changed) -> None:
    held = applied(BEFORE)
    before = deepcopy(held)
    first = held.difference(changed, STYLE)
    assert held == before
    assert held.difference(changed, STYLE) == first


def test_udp_real_servers_are_deleted_at_once() -> None:
    held = applied(planned("dns", "1.5", "2.5", port="53/UDP"))
    difference = held.difference(planned("dns", "1.5", port="53/UDP"), STYLE)
    assert [type(operation) for operation in difference.servers] == [DeleteDestination]
    assert not difference.draining


def test_virtual_server_of_a_vip_replaces_that_of_a_node_port() -> None:
    node_port = planned("a", "1.5", port="90@80", ip="10.96.0.7")
    vip = dict(plans(NODE, service("b", "80", ip="10.96.0.8", external_ips="192.0.2.1"),
                     endpoint_slice("b", endpoint("10.244.2.9", "node2"))))  # fmt: skip
    held = applied(node_port)
    to_vip = held.difference({**vip}, STYLE)
    weights = {
        one.where.address: one.weight for one in to_vip.servers
        if isinstance(one, PutDestination) and one.key.address == parse_address("192.0.2.1")
    }  # fmt: skip
    assert weights == {parse_address("10.244.2.9"): 1, parse_address("10.244.1.5"): 0}
    assert not to_vip.deleted
    held.acknowledge(to_vip)
    assert not held.difference(dict.fromkeys(vip), STYLE).deleted[1:]


def test_marks_are_kept_unless_they_would_masquerade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_number", lambda text, seed: 7)
    one, two = (planned(name, "1.5", "2.5", variant=2, ip=ip) for name, ip in
                (("one", "10.96.0.1"), ("two", "10.96.0.2")))  # fmt: skip
    held = applied(one, two)
    assert marks(held) == {names.mark(7, 14), names.mark(8, 14)}
    (kept,) = marks(applied(one, two, deleted("one")))
    assert kept == names.mark(8, 14)
    rest = {key: plan for key, plan in two.items() if plan}
    resynced = Applied.after(rest, STYLE, held)
    assert marks(resynced) == {names.mark(8, 14)}
    moved = Style(
        family=Family.IPV4, scheduler="rr", node_ip=None, node_port_addresses=(), masquerade_bit=3
    )
    (changed,) = marks(Applied.after(rest, moved, held))
    assert names.is_own_mark(changed, 3)
    assert not names.is_own_mark(names.mark(8, 14), 3)


def marks(held: Applied) -> set[int]:
    return {key.mark for key in held.servers if key.address is None}


def test_entry_that_gets_another_mark_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    local = planned("web", "1.5", "2.5", variant=2)
    other = planned("other", "1.5", "2.5", variant=2)
    held = applied(local)
    difference = held.difference({**dict.fromkeys(local), **other}, STYLE)
    assert [each.set for each in difference.adds if each.mark] == [names.SHORT_CIRCUIT]
    assert not [each for each in difference.deletes if each.mark]


class Kernel:
    """A kernel that does what a difference says, and refuses what a real one would."""

    def __init__(self) -> None:
        self.servers: dict[object, HeldServer] = {}
        self.entries: dict[names.SetKind, dict[str, int]] = {}
        self.addresses: set[bytes] = set()

    def write(self, difference: Difference) -> None:
        rest = set(difference.rest)
        for element in difference.adds:
            self.entries.setdefault(element.set, {})[element.entry] = element.mark
        for operation in difference.servers:
            if operation in rest:
                continue
            held = self.servers.get(operation.key)
            weights = dict(held.weights) if held else {}
            if isinstance(operation, PutServer):
                assert operation.new is (held is None)
                self.servers[operation.key] = HeldServer(operation.scheduling, weights)
                continue
            assert held
            if isinstance(operation, PutDestination):
                assert operation.new is (operation.where not in weights)
                weights[operation.where] = operation.weight
            elif isinstance(operation, DeleteDestination):
                del weights[operation.where]
            self.servers[operation.key] = held._replace(weights=weights)
        for each in difference.deleted:
            del self.servers[each.key]
        for element in difference.deletes:
            del self.entries[element.set][element.entry]
        for key, where in difference.draining:
            held = self.servers[key]
            self.servers[key] = held._replace(
                weights={at: weight for at, weight in held.weights.items() if at != where})
        assert not difference.bind & self.addresses
        assert difference.unbind <= self.addresses
        self.addresses = (self.addresses | difference.bind) - difference.unbind


PODS = st.lists(st.sampled_from(["1.5", "1.6", "2.5", "2.6"]), unique=True)
SERVICES = st.builds(
    lambda name, pods, variant, port, first: planned(
        name, *pods, variant=variant, port=port.format(ord(name)), ip="10.96.0.1", first=first),
    st.sampled_from("abc"), PODS, st.integers(0, len(VARIANTS) - 1),
    st.sampled_from(["{}", "{}/UDP", "{0}@300{0}"]), st.sampled_from([None, None, 0, 50]),
)  # fmt: skip
STEPS = st.lists(
    st.tuples(st.one_of(SERVICES, st.builds(deleted, st.sampled_from("abc"))), st.booleans()), max_size=12
)


@given(STEPS)
def test_acknowledged_changes_add_up_to_the_plans(steps: list[tuple[Changed, bool]]) -> None:
    """Some writes fail, with nothing done; a full comparison then finds nothing to write."""
    held, kernel = Applied(), Kernel()
    current: dict[ServicePortKey, ServicePlan] = {}
    for changed, succeeds in steps:
        before = deepcopy(held)
        difference = held.difference(changed, STYLE)
        assert held == before
        if not succeeds:
            continue
        kernel.write(difference)
        held.acknowledge(difference)
        for key, plan in changed.items():
            current.pop(key, None)
            if plan:
                current[key] = plan
    expected = Applied.after(current, STYLE, held)
    rest = compare(expected, kernel.servers, kernel.entries, kernel.addresses, ())  # type: ignore[arg-type]
    assert rest.counts == {}
    assert (expected.addresses, expected.servers.keys()) == (held.addresses, held.servers.keys())


@given(st.lists(st.tuples(st.one_of(SERVICES, st.builds(deleted, st.sampled_from("abc"))), st.integers(0, 3)),
                max_size=12))
def test_what_is_written_in_parts_adds_up_to_the_plans(steps: list[tuple[Changed, int]]) -> None:
    """Of each change, up to three operations that may wait are written; then the rest, one by one."""
    held, kernel = Applied(), Kernel()
    current: dict[ServicePortKey, ServicePlan] = {}

    def write(changed: Changed, most: int) -> None:
        difference = held.difference(changed, STYLE)
        at_once, others = difference.split()
        assert sorted(map(repr, [*at_once, *others])) == sorted(map(repr, difference.servers))
        difference.leave(others[most:])
        kernel.write(difference)
        held.acknowledge(difference)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "MANY", 1)
        patch.setattr(state, "FIRST", 1)
        for changed, most in steps:
            write(changed, most)
            current = {key: plan for key, plan in (current | changed).items() if plan}
            assert held.unfinished <= current.keys()
        while held.unfinished:
            write({key: current[key] for key in held.unfinished}, 1)
    expected = Applied.after(current, STYLE, held)
    rest = compare(expected, kernel.servers, kernel.entries, kernel.addresses, ())  # type: ignore[arg-type]
    assert rest.counts == {}
    assert expected == held


def test_the_rest_of_a_small_virtual_server_is_written_first() -> None:
    pods = [f"2.{host}" for host in range(1, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "MANY", 3)
        patch.setattr(state, "FIRST", 2)
        difference = Applied().difference(
            {**planned("large", *pods, ip="10.96.0.2"), **planned("small", *pods[:5]),
             **planned("tiny", *pods[:3], ip="10.96.0.3")}, STYLE)
        at_once, others = difference.split()
    number = {"10.96.0.1": 3 + 1, "10.96.0.2": 6 + 1, "10.96.0.3": 0}
    assert len(at_once) == 2 + 2 + 4
    assert [str(each.key).partition(":")[0] for each in others] == [
        ip for ip in ("10.96.0.1", "10.96.0.2") for _ in range(number[ip])]
