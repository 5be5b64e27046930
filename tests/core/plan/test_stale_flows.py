"""Stale flows, and the changes after which they must be looked for."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import addresses, destinations, endpoint, endpoint_slice, node_view, service
from kproxy_core.model.address import Address, Family, Protocol, Socket, parse_address
from kproxy_core.model.service import Destination, EndpointSlice, Service, ServicePortKey
from kproxy_core.plan.claims import Claims
from kproxy_core.plan.endpoints import endpoints_of
from kproxy_core.plan.service_plan import Frontend, ServicePlan, plan_service, serving_destinations
from kproxy_core.plan.stale_flows import StaleFlows, StaleFlowTracker, adds_tcp, is_stale_syn, relay

NODE = node_view()
VIP, EXTERNAL = parse_address("10.96.0.1"), parse_address("192.0.2.1")
NODE_ADDRESS, OTHER_NODE_ADDRESS, ELSEWHERE = addresses("172.18.0.2 172.19.0.2 198.51.100.1")
NODE_PORT_ADDRESSES = frozenset([NODE_ADDRESS])
A, B, C = destinations("10.244.0.1:9053 10.244.0.2:9053 10.244.0.3:9053")


def dns(*ports: str, ip: str = "10.96.0.1", external_ips: str = "") -> Service:
    return service("dns", *(ports or ("53/UDP",)), ip=ip, external_ips=external_ips)


def slice_of(text: str, of: str = "dns", *, port: str = "9053/UDP") -> EndpointSlice:
    """Endpoints by address: ``!`` terminates and serves, ``?`` does neither, ``*`` is only ready."""
    kinds = {"!": (False, True, True), "?": (False, False, False), "*": (True, False, False)}
    return endpoint_slice(of, *(
        endpoint(each.rstrip("!?*"), ready=ready, serving=serving, terminating=terminating)
        for each in text.split()
        for ready, serving, terminating in [kinds.get(each[-1], (True, True, False))]
    ), ports=[port])


class Proxy:
    """Passes Services to a tracker like the loop, including rivals."""

    def __init__(self) -> None:
        self.tracker = StaleFlowTracker()
        self.relays: frozenset[Destination] = frozenset()
        self.allowed: dict[ServicePortKey, frozenset[Destination]] = {}
        self.plans: dict[ServicePortKey, ServicePlan] = {}
        self._objects: dict[str, tuple[Service, EndpointSlice]] = {}
        self._claims = Claims()

    def apply(self, wanted: Service, endpoints: str | EndpointSlice) -> None:
        piece = slice_of(endpoints, wanted.name.name) if isinstance(endpoints, str) else endpoints
        self._objects[wanted.name.name] = wanted, piece
        self._change(wanted, plan_service(wanted, {"": piece}, NODE))

    def delete(self, name: str) -> None:
        gone, _ = self._objects.pop(name)
        self._change(gone, ())

    def _change(self, changed: Service, wanted: tuple[ServicePlan, ...]) -> None:
        touched = self._claims.want(changed.name, wanted)
        for name in (changed.name, *(touched - {changed.name})):
            granted = {plan.key: plan for plan in self._claims.granted(name)}
            for key in {*granted, *(known for known in self.plans if known.service == name)}:
                plan = granted.get(key)
                serving = self._serving(key) | self.relays if plan else frozenset()
                self.tracker.put(key, plan, serving)
                self.plans.pop(key, None)
                if plan:
                    self.plans[key] = plan
                    self.allowed[key] = serving | set(plan.reachable)

    def _serving(self, key: ServicePortKey) -> frozenset[Destination]:
        owner, piece = self._objects[key.name]
        (port,) = (p for p in owner.ports if (p.name, p.protocol) == (key.port_name, key.protocol))
        return serving_destinations(endpoints_of(port, {"": piece}))

    def take(self, node_port_addresses: Iterable[Address] = NODE_PORT_ADDRESSES) -> StaleFlows:
        return self.tracker.take(frozenset(node_port_addresses))


def settled(wanted: Service, endpoints: str) -> Proxy:
    """A proxy that has looked at all flows once."""
    proxy = Proxy()
    proxy.apply(wanted, endpoints)
    assert proxy.take()
    assert not proxy.take()
    return proxy


def test_flows_to_an_endpoint_that_left_are_stale_and_others_are_not() -> None:
    proxy = settled(dns(external_ips="192.0.2.1"), "10.244.0.1 10.244.0.2")
    proxy.apply(dns(external_ips="192.0.2.1"), "10.244.0.2")
    stale = proxy.take()
    for vip in (VIP, EXTERNAL):
        assert stale.is_stale((vip, 53), A)
        assert not stale.is_stale((vip, 53), B)
        assert not stale.is_stale((vip, 54), A)
    assert not stale.is_stale((ELSEWHERE, 53), A)
    assert stale.ports == {53}


def test_flows_to_the_ports_of_relays_are_never_stale() -> None:
    proxy = settled(dns(), "10.244.0.1 10.244.0.2")
    proxy.relays = frozenset({relay(Family.IPV4, 40001)})
    proxy.apply(dns(), "10.244.0.2")
    stale = proxy.take()
    assert stale.is_stale((VIP, 53), A)
    assert not stale.is_stale((VIP, 53), (NODE_ADDRESS, 40001))
    assert stale.is_stale((VIP, 53), (NODE_ADDRESS, 40002)), "of an earlier process"
    assert stale.is_stale((VIP, 53), (VIP, 53))
    proxy.delete("dns")
    assert proxy.take().is_stale((VIP, 53), (NODE_ADDRESS, 40001))


def test_flows_to_replaced_relays_are_stale_once_an_endpoint_leaves() -> None:
    proxy = Proxy()
    proxy.relays = frozenset({relay(Family.IPV4, 40001)})
    proxy.apply(dns(), "10.244.0.1 10.244.0.2")
    proxy.take()
    proxy.relays = frozenset()
    proxy.apply(dns(), "10.244.0.1 10.244.0.2 10.244.0.3")
    assert not proxy.take()
    proxy.apply(dns(external_ips="192.0.2.1"), "10.244.0.1 10.244.0.2 10.244.0.3")
    assert not proxy.take().is_stale((EXTERNAL, 53), (NODE_ADDRESS, 40001))
    proxy.apply(dns(external_ips="192.0.2.1"), "10.244.0.1 10.244.0.3")
    stale = proxy.take()
    assert stale.is_stale((VIP, 53), (NODE_ADDRESS, 40001))
    assert not stale.is_stale((VIP, 53), A)


def test_flows_to_relays_of_a_mode_that_took_over_are_not_stale() -> None:
    proxy = settled(dns("53/UDP@30053"), "10.244.0.1")
    proxy.relays = frozenset({relay(Family.IPV4, 40001)})
    proxy.apply(dns("53/UDP@30053"), "10.244.0.1")
    stale = proxy.take([NODE_ADDRESS, OTHER_NODE_ADDRESS])  # The mode serves node ports on more addresses.
    for address in (NODE_ADDRESS, OTHER_NODE_ADDRESS):
        assert not stale.is_stale((address, 30053), (OTHER_NODE_ADDRESS, 40001))
        assert not stale.is_stale((address, 30053), A)
        assert stale.is_stale((address, 30053), (address, 30053))


def test_an_endpoint_is_its_address_and_port() -> None:
    proxy = settled(dns(), "10.244.0.1")
    proxy.apply(dns(), slice_of("10.244.0.1", port="9054/UDP"))
    assert proxy.take().is_stale((VIP, 53), A)


@pytest.mark.parametrize(("now", "stale"), [
    ("10.244.0.1! 10.244.0.2", False),
    ("10.244.0.1? 10.244.0.2", True),
    ("10.244.0.1* 10.244.0.2", False),
], ids=["terminates but serves", "does not serve", "is used though it does not serve"])
def test_flows_keep_an_endpoint_that_serves(now: str, stale: bool) -> None:
    proxy = settled(dns(), "10.244.0.1 10.244.0.2 10.244.0.3")
    proxy.apply(dns(), now)
    assert proxy.take().is_stale((VIP, 53), A) is stale


def test_without_endpoints_only_flows_that_were_sent_to_one_are_stale() -> None:
    proxy = settled(dns(), "10.244.0.1")
    proxy.apply(dns(), "")
    stale = proxy.take()
    assert stale.is_stale((VIP, 53), A)
    assert not stale.is_stale((VIP, 53), (VIP, 53))


def test_an_untranslated_flow_is_stale_as_soon_as_an_endpoint_serves() -> None:
    proxy = settled(dns(), "")
    assert not proxy.take()
    proxy.apply(dns(), "10.244.0.1")
    assert proxy.take().is_stale((VIP, 53), (VIP, 53))


def test_flows_older_than_the_service_or_a_new_external_ip_are_stale() -> None:
    proxy = Proxy()
    proxy.apply(dns(), "10.244.0.1")
    assert proxy.take().is_stale((VIP, 53), (VIP, 53))
    proxy.apply(dns(external_ips="192.0.2.1"), "10.244.0.1")
    stale = proxy.take()
    assert stale.is_stale((EXTERNAL, 53), (EXTERNAL, 53))
    assert not stale.is_stale((VIP, 53), A)


def test_only_translated_flows_to_deleted_frontends_are_stale() -> None:
    proxy = settled(dns("53/UDP@30053", external_ips="192.0.2.1"), "10.244.0.1")
    proxy.apply(dns(), "10.244.0.1")
    stale = proxy.take()
    for gone in ((EXTERNAL, 53), (NODE_ADDRESS, 30053)):
        assert stale.is_stale(gone, A)
        assert not stale.is_stale(gone, gone)
    assert not stale.is_stale((VIP, 53), A)
    proxy.delete("dns")
    assert proxy.take().is_stale((VIP, 53), A)


def test_a_frontend_that_changes_hands_is_judged_by_its_new_owner() -> None:
    for order in (("old", "new"), ("new", "old")):
        proxy = Proxy()
        for name, vip, endpoints in (("old", "10.96.0.1", "10.244.0.1"), ("new", "10.96.0.2", "10.244.0.2")):
            proxy.apply(service(name, "53/UDP", ip=vip), endpoints)
        assert proxy.take()
        for name in order:
            vip, endpoints = {"old": ("10.96.0.2", "10.244.0.1"), "new": ("10.96.0.1", "10.244.0.2")}[name]
            proxy.apply(service(name, "53/UDP", ip=vip), endpoints)
        stale = proxy.take()
        assert stale.is_stale((VIP, 53), A)
        assert not stale.is_stale((VIP, 53), B)


def test_node_ports_are_looked_at_on_the_addresses_that_serve_them() -> None:
    proxy = settled(dns("53/UDP@30053"), "10.244.0.1 10.244.0.2")
    proxy.apply(dns("53/UDP@30053"), "10.244.0.2")
    stale = proxy.take()
    assert stale.is_stale((NODE_ADDRESS, 30053), A)
    assert not stale.is_stale((NODE_ADDRESS, 30053), B)
    for elsewhere in (OTHER_NODE_ADDRESS, ELSEWHERE):
        assert not stale.is_stale((elsewhere, 30053), A)


def test_a_new_address_of_the_node_may_have_older_flows_to_node_ports() -> None:
    proxy = settled(dns("53/UDP@30053"), "10.244.0.1")
    stale = proxy.take([NODE_ADDRESS, OTHER_NODE_ADDRESS])
    assert stale.is_stale((OTHER_NODE_ADDRESS, 30053), (OTHER_NODE_ADDRESS, 30053))
    assert not proxy.take([NODE_ADDRESS])


def test_a_vip_on_an_address_of_the_node_precedes_a_node_port() -> None:
    proxy = settled(service("vip", "30053/UDP", external_ips="172.18.0.2"), "10.244.0.1")
    proxy.apply(service("dns", "53/UDP@30053", ip="10.96.0.2"), "10.244.0.2")
    assert not proxy.take().is_stale((NODE_ADDRESS, 30053), A)
    proxy.delete("vip")
    stale = proxy.take()
    assert stale.is_stale((NODE_ADDRESS, 30053), A)
    assert not stale.is_stale((NODE_ADDRESS, 30053), B)


@pytest.mark.parametrize(("wanted", "endpoints"), [
    (dns(), "10.244.0.1 10.244.0.2 10.244.0.3"),
    (dns(), "10.244.0.2! 10.244.0.1"),
    (service("dns", "53/UDP", internal_local=True), "10.244.0.1 10.244.0.2"),
    (service("dns", "53/UDP", affinity=10), "10.244.0.1 10.244.0.2"),
], ids=["one more endpoint", "one terminates", "policy", "affinity"])
def test_changes_that_leave_every_flow_right_are_not_worth_a_look(wanted: Service, endpoints: str) -> None:
    proxy = settled(dns(), "10.244.0.1 10.244.0.2")
    proxy.apply(wanted, endpoints)
    assert not proxy.take()


def test_other_protocols_are_never_looked_at() -> None:
    proxy = Proxy()
    proxy.apply(dns("t:53/TCP", "s:53/SCTP"), "10.244.0.1")
    proxy.delete("dns")
    assert not proxy.take()


def test_an_unanswered_syn_is_stale_if_its_destination_is_a_tcp_frontend() -> None:
    frontends = dict.fromkeys([Frontend(VIP, Protocol.TCP, 53), Frontend(None, Protocol.TCP, 30053),
                               Frontend(EXTERNAL, Protocol.UDP, 53)], "a plan")  # fmt: skip
    for destination in ((VIP, 53), (NODE_ADDRESS, 30053)):
        assert is_stale_syn(destination, frontends.get, NODE_PORT_ADDRESSES)
    for other in ((VIP, 54), (VIP, 30053), (EXTERNAL, 53), (ELSEWHERE, 30053)):
        assert not is_stale_syn(other, frontends.get, NODE_PORT_ADDRESSES)


def test_new_frontends_of_tcp_are_noticed() -> None:
    def plan(*ports: str, external_ips: str = "", endpoints: str = "10.244.0.1") -> ServicePlan:
        return plan_service(dns(*ports, external_ips=external_ips), {"": slice_of(endpoints)}, NODE)[0]

    tcp, more = plan("53/TCP"), plan("53/TCP", external_ips="192.0.2.1")
    assert adds_tcp(None, tcp)
    assert adds_tcp(tcp, more)
    assert adds_tcp(tcp, plan("53/TCP@30053"))
    assert not adds_tcp(more, tcp)
    assert not adds_tcp(tcp, None)
    assert not adds_tcp(tcp, plan("53/TCP", endpoints=""))
    assert not adds_tcp(None, plan("53/UDP"))


def test_flows_that_could_not_be_deleted_are_examined_again() -> None:
    proxy = settled(dns(), "10.244.0.1 10.244.0.2")
    proxy.apply(dns(), "10.244.0.2")
    failed = proxy.take()
    proxy.apply(dns(), "10.244.0.2 10.244.0.3")
    proxy.tracker.give_back(failed)
    stale = proxy.take()
    assert stale.is_stale((VIP, 53), A)
    assert not stale.is_stale((VIP, 53), C)


SERVICES = ("one", "two", "three")
SERVING_ADDRESSES = frozenset([NODE_ADDRESS])
DESTINATIONS: list[Socket] = [
    (address, port)
    for address in addresses("10.96.0.1 10.96.0.2 10.96.0.3 192.0.2.1 172.18.0.2 172.19.0.2")
    for port in (53, 30053)
]
Flow = tuple[Socket, Socket]

endpoint_texts = st.lists(
    st.sampled_from(["10.244.0.1", "10.244.0.2", "10.244.0.3", "10.244.0.1!", "10.244.0.2?", "10.244.0.3*"]),
    max_size=3, unique_by=lambda text: text[:10],
).map(" ".join)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Service, EndpointSlice] | str:
    """A Service with its present endpoints, or the name of a deleted one."""
    name = draw(st.sampled_from(SERVICES))
    if draw(st.integers(0, 3)) == 0:
        return name
    port = draw(st.sampled_from(["53/UDP", "53/UDP@30053", "30053/UDP", "30053/UDP@30053", "53/TCP@30053"]))
    wanted = service(
        name, port,
        ip=f"10.96.0.{SERVICES.index(name) + 1}",
        external_ips=draw(st.sampled_from(["", "192.0.2.1", "172.18.0.2", "192.0.2.1 172.18.0.2"])),
    )
    protocol = port.partition("@")[0].partition("/")[2]
    return wanted, slice_of(draw(endpoint_texts), name, port=f"9053/{protocol}")


def right_answers(proxy: Proxy, to: Socket) -> frozenset[Destination]:
    """Return the endpoints that may answer a flow to *to*, computed from all plans."""
    by_frontend = {
        (frontend.address, frontend.port): proxy.allowed[key]
        for key, plan in proxy.plans.items() if key.protocol.name == "UDP"
        for frontend in plan.frontends()
    }
    if to in by_frontend:
        return by_frontend[to]
    return by_frontend.get((None, to[1]), frozenset()) if to[0] in SERVING_ADDRESSES else frozenset()


@given(
    st.sets(st.tuples(st.sampled_from(DESTINATIONS), st.sampled_from([*DESTINATIONS, A, B, C]))),
    st.lists(st.tuples(changes(), st.sampled_from(["delete", "fail", "wait"]))),
)
def test_a_table_of_flows_is_right_after_any_changes(
    older: set[Flow], steps: list[tuple[tuple[Service, EndpointSlice] | str, str]]
) -> None:
    """Flows of an earlier process included, and no flow is lost that is right."""
    proxy = Proxy()
    table = set(older)
    known: set[str] = set()
    ever: set[Socket] = set()
    for change, then in steps:
        if isinstance(change, str):
            if change not in known:
                continue
            known.remove(change)
            proxy.delete(change)
        else:
            known.add(change[0].name.name)
            proxy.apply(*change)
        ever |= {to for to in DESTINATIONS if right_answers(proxy, to)}
        for to in DESTINATIONS:
            answers = right_answers(proxy, to)
            table |= {(to, answer) for answer in answers} if answers else {(to, to)}
        if then == "wait":
            continue
        stale = proxy.take(SERVING_ADDRESSES)
        gone = {flow for flow in table if stale.is_stale(*flow)}
        for to, answer in gone:
            assert answer not in right_answers(proxy, to)
        if then == "fail":
            proxy.tracker.give_back(stale)
            continue
        table -= gone
        for to, answer in table:
            if to in ever:
                answers = right_answers(proxy, to)
                assert answer in answers or (not answers and answer == to)
