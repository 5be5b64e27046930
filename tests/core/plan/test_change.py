"""The changes between two sets of plans, and between a kernel and plans."""


from msgspec import structs

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_core.app.changes import changes, changes_in_kernel, document
from kproxy_core.model.address import Protocol, parse_address
from kproxy_core.plan.hashing import HashBy
from kproxy_core.plan.service_plan import Frontend, ServicePlan

NODE = node_view("node1", zone="a", pods="10.1.0.0/16", node_port_addresses="192.0.2.10", ip="192.0.2.10")


def web(*endpoints: str, name: str = "shop/web", **options: object) -> ServicePlan:
    made = service(name, "http:80@30080", **options)  # type: ignore[arg-type]
    (plan,) = plans(NODE, made, endpoint_slice(name, *endpoints, ports=["http:8080"])).values()
    return plan


def test_equal_plans_make_no_change() -> None:
    assert list(changes([document(web("10.1.1.1"))], [document(web("10.1.1.1"))])) == []


def test_a_service_port_is_gained_and_lost_with_its_frontends() -> None:
    (gained,) = changes([], [document(web("10.1.1.1"))])
    (lost,) = changes([document(web("10.1.1.1"))], [])
    assert (gained["change"], lost["change"]) == ("gained", "lost")
    assert gained["details"] == lost["details"]
    assert "node:30080/tcp" in gained["details"][0]


def test_a_change_names_endpoints_and_settings() -> None:
    before = web("10.1.1.1", "10.1.2.1")
    after = web("10.1.1.1", "10.1.3.1", affinity=60)
    (change,) = changes([document(before)], [document(after)])
    assert change["details"] == [
        "endpoint 10.1.2.1:8080 removed", "endpoint 10.1.3.1:8080 added",
        "seconds of session affinity: none becomes 60",
    ]  # fmt: skip


def test_a_change_names_weights_and_hash() -> None:
    def planned(one: int | None, two: int | None, hash_by: HashBy = "") -> ServicePlan:
        slices = [endpoint_slice("web", f"10.1.{n}.1", name=f"web-{n}", weight=weight)
                  for n, weight in ((1, one), (2, two))]
        (plan,) = plans(NODE, service("web", hash_by=hash_by), *slices).values()
        return plan

    (change,) = changes([document(planned(None, None))], [document(planned(75, 25, "client"))])
    assert change["details"] == [
        "weights: none becomes 3 for 10.1.1.1:8080, 1 for 10.1.2.1:8080", "hash: none becomes client"]
    (change,) = changes([document(planned(75, 25))], [document(planned(0, 25))])
    assert change["details"] == [
        "endpoint 10.1.1.1:8080 removed", "endpoint without new connections 10.1.1.1:8080 added",
        "weights: 3 for 10.1.1.1:8080, 1 for 10.1.2.1:8080 becomes none"]


def test_a_kernel_is_compared_by_frontends_where_no_plans_are_known() -> None:
    plan = web("10.1.1.1")
    difference = {
        "frontend": "node:30080/TCP", "service_port": str(plan.key), "difference": "endpoint x is missing"}
    stale = {"frontend": "10.96.0.9:80/TCP"}
    gone = Frontend(parse_address("10.96.0.9"), Protocol.TCP, 80)
    held = [*plan.frontends(), gone]
    new = structs.replace(
        web("10.1.9.9", name="shop/new"), node_port=0, cluster_ip=parse_address("10.96.7.7"))
    found = list(changes_in_kernel([plan, new], held, [difference], [stale]))
    assert [(each["change"], each["service_port"]) for each in found] == [
        ("gained", "shop/new:http"), ("changed", "shop/web:http"), ("lost", "")]
    assert found[1]["details"] == ["now node:30080/TCP: endpoint x is missing"]
