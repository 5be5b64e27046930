"""The owner of a frontend that several services want."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import node_view, service, service_name
from kproxy_core.model.address import Protocol, parse_address
from kproxy_core.model.service import Service, ServiceName
from kproxy_core.plan.claims import Claims, Conflict
from kproxy_core.plan.service_plan import Frontend, ServicePlan, plan_service

NODE = node_view()
OLD, NEW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


def want(claims: Claims, wanted: Service) -> set[ServiceName]:
    return claims.want(wanted.name, plan_service(wanted, None, NODE))


def only_plan(claims: Claims, name: str) -> ServicePlan:
    (plan,) = claims.granted(service_name(name))
    return plan


def test_a_service_without_rivals_gets_the_very_plans_it_wants() -> None:
    claims = Claims()
    plans = plan_service(service("web"), None, NODE)
    assert claims.want(service_name("web"), plans) == set()
    assert claims.granted(service_name("web")) is plans
    assert claims.take_conflicts() == []


def test_the_older_service_wins_in_any_order() -> None:
    older = service("older", ip="10.96.0.1", external_ips="192.0.2.1", created=OLD)
    newer = service("newer", ip="10.96.0.2", external_ips="192.0.2.1 192.0.2.2", created=NEW)
    for order in ((older, newer), (newer, older)):
        claims = Claims()
        touched = [want(claims, each) for each in order]
        assert touched == [set(), {newer.name} if order[0] is newer else set()]
        assert only_plan(claims, "older").external_ips == (parse_address("192.0.2.1"),)
        assert only_plan(claims, "newer").external_ips == (parse_address("192.0.2.2"),)
        assert claims.take_conflicts() == [
            Conflict(
                Frontend(parse_address("192.0.2.1"), Protocol.TCP, 80),
                winner=only_plan(claims, "older").key,
                loser=only_plan(claims, "newer").key,
            )
        ]


def test_a_service_of_unknown_age_is_the_newest() -> None:
    claims = Claims()
    want(claims, service("a", "80@30000", ip="10.96.0.1", created=""))
    want(claims, service("b", "80@30000", ip="10.96.0.2", created=NEW))
    assert (only_plan(claims, "a").node_port, only_plan(claims, "b").node_port) == (0, 30000)


def test_of_the_same_age_the_first_by_name_wins() -> None:
    claims = Claims()
    want(claims, service("b/web", ip="10.96.0.1"))
    want(claims, service("a/web", ip="10.96.0.1"))
    assert only_plan(claims, "b/web").cluster_ip is None
    assert only_plan(claims, "a/web").cluster_ip == parse_address("10.96.0.1")


def test_another_port_or_protocol_is_another_frontend() -> None:
    claims = Claims()
    for name, port in (("a", "53/UDP"), ("b", "53/TCP"), ("c", "54/UDP")):
        want(claims, service(name, port, ip="10.96.0.1"))
    assert claims.take_conflicts() == []


def test_all_kinds_of_addresses_contend_with_each_other() -> None:
    claims = Claims()
    want(claims, service("cluster", ip="10.96.0.1", created=OLD))
    want(claims, service("balancer", ip="10.96.0.2", load_balancer_ips="10.96.0.1 192.0.2.1", created=NEW))
    assert only_plan(claims, "balancer").load_balancer_ips == (parse_address("192.0.2.1"),)


def test_the_takeover_takes_over_when_the_winner_leaves_and_gives_back_when_it_returns() -> None:
    claims = Claims()
    winner = service("a", ip="10.96.0.1", created=OLD)
    want(claims, winner)
    for name in "bc":
        want(claims, service(name, ip="10.96.0.1", created=NEW))
    assert claims.want(winner.name, ()) == {service_name("b")}
    assert claims.granted(winner.name) == ()
    assert only_plan(claims, "b").cluster_ip is not None
    assert want(claims, winner) == {service_name("b")}
    assert only_plan(claims, "b").cluster_ip is None


def test_deleting_a_losing_service_affects_no_other() -> None:
    claims = Claims()
    want(claims, service("a", ip="10.96.0.1", created=OLD))
    want(claims, service("b", ip="10.96.0.1", created=NEW))
    assert claims.want(service_name("b"), ()) == set()
    assert claims.take_conflicts() == []


def test_a_conflict_is_reported_once_as_long_as_it_lasts() -> None:
    claims = Claims()
    want(claims, service("a", ip="10.96.0.1", created=OLD))
    want(claims, service("b", ip="10.96.0.1", created=NEW))
    assert [str(c) for c in claims.take_conflicts()] == [
        "default/b is not served on 10.96.0.1:80/TCP: it belongs to default/a"
    ]
    want(claims, service("b", ip="10.96.0.1", created=NEW, affinity=10))
    assert claims.take_conflicts() == []


def test_two_ports_of_one_service_do_not_share_a_frontend_either() -> None:
    claims = Claims()
    want(claims, service("web", "b:80", "a:80"))
    by_port = {plan.key.port_name: plan.cluster_ip for plan in claims.granted(service_name("web"))}
    assert by_port == {"a": parse_address("10.96.0.1"), "b": None}


def test_an_address_that_is_external_and_of_the_load_balancer_is_no_conflict() -> None:
    claims = Claims()
    want(claims, service("web", external_ips="192.0.2.1", load_balancer_ips="192.0.2.1"))
    assert claims.take_conflicts() == []


def test_a_health_check_node_port_belongs_to_one_service_with_all_its_ports() -> None:
    claims = Claims()
    for name, ip, created in (("a", "10.96.0.1", OLD), ("b", "10.96.0.2", NEW)):
        want(claims, service(name, "x:80", "y:81", ip=ip, created=created, health_check_node_port=32000))
    assert [p.health_check_node_port for p in claims.granted(service_name("a"))] == [32000, 32000]
    assert [p.health_check_node_port for p in claims.granted(service_name("b"))] == [0, 0]
    assert len(claims.take_conflicts()) == 1


services = st.builds(
    lambda name, created, ip, external, ports, health: service(
        name, *ports, ip=f"10.96.0.{ip}", created=created, external_ips=external,
        health_check_node_port=health,
    ),
    st.sampled_from(["n1/a", "n1/b", "n2/a", "n2/b"]),
    st.sampled_from(["", OLD, NEW]),
    st.integers(1, 2),
    st.sampled_from(["", "10.96.0.1", "10.96.0.2 192.0.2.1"]),
    st.lists(
        st.sampled_from(["x:80@30000", "y:80@30001", "z:81@30000", "u:80/UDP@30000"]),
        min_size=1, max_size=3, unique=True,
    ),
    st.sampled_from([0, 30000, 32000]),
)


@given(st.lists(st.tuples(services, st.booleans()), max_size=20))
def test_any_history_ends_where_a_fresh_start_would(history: Sequence[tuple[Service, bool]]) -> None:
    lived = Claims()
    granted: dict[ServiceName, tuple[ServicePlan, ...]] = {}
    final: dict[ServiceName, Service] = {}
    for each, gone in history:
        final.pop(each.name, None)
        if not gone:
            final[each.name] = each
        touched = lived.want(each.name, () if gone else plan_service(each, None, NODE))
        # The Services that are not touched still hold the frontends granted before.
        for name in {each.name, *touched}:
            granted[name] = lived.granted(name)
        assert granted == {name: lived.granted(name) for name in granted}
    fresh = Claims()
    for name in sorted(final, reverse=True):
        want(fresh, final[name])
    assert {name: fresh.granted(name) for name in final} == {n: p for n, p in granted.items() if p}
    assert all(
        conflict.frontend not in set(plan.frontends())
        for conflict in lived.take_conflicts()
        for plan in lived.granted(conflict.loser.service)
        if plan.key == conflict.loser
    )


@given(st.lists(services, max_size=8, unique_by=lambda s: s.name))
def test_every_frontend_is_granted_exactly_once(wanting: Sequence[Service]) -> None:
    claims = Claims()
    for each in wanting:
        want(claims, each)
    got = [
        frontend
        for each in wanting
        for plan in claims.granted(each.name)
        for frontend in dict.fromkeys(plan.frontends())
    ]
    wanted = {f for each in wanting for p in plan_service(each, None, NODE) for f in p.frontends()}
    contended_by_health = {
        Frontend(None, Protocol.TCP, s.health_check_node_port) for s in wanting if s.health_check_node_port
    }
    assert len(got) == len(set(got))
    assert wanted - contended_by_health <= set(got) <= wanted
