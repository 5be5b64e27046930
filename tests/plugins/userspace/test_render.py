"""Relays and portals of plans, and their text."""

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_core.model.address import Family, parse_address
from kproxy_core.model.service import Service
from kproxy_core.nft.messages import commands_text
from kproxy_userspace import batch
from kproxy_userspace.wanted import Redirect, Wanted, wanted

NODE = node_view(anywhere=True)


def relay(of: Service, *slices: str) -> Wanted:
    found = plans(NODE, of, *([endpoint_slice(of.name.name, *slices)] if slices else []))
    (only,) = wanted(next(iter(found.values())), NODE, None).values()
    return only


def redirects(of: Service) -> list[Redirect]:
    return [Redirect(portal, 40000) for portal in relay(of).portals]


def test_a_relay_has_the_usable_endpoints() -> None:
    found = relay(service(affinity=60), "10.0.0.1", "10.0.0.2")
    assert found.endpoints == (("10.0.0.1", 8080), ("10.0.0.2", 8080))
    assert relay(service(affinity=60)).affinity_seconds == 60


def test_sctp_is_not_relayed() -> None:
    (plan,) = plans(NODE, service("web", "80/SCTP")).values()
    assert wanted(plan, NODE, None) == {}


def test_rules_of_a_cluster_ip_and_a_node_port() -> None:
    text = batch.iptables_change([], redirects(service("web", "80@30080")))
    head = '-m comment --comment "default/web" -p tcp -m tcp --dport'
    assert text.splitlines() == [
        "*nat",
        f"-A KUBE-PORTALS-CONTAINER {head} 80 -d 10.96.0.1 -j REDIRECT --to-ports 40000",
        f"-A KUBE-PORTALS-HOST {head} 80 -d 10.96.0.1 -j REDIRECT --to-ports 40000",
        f"-A KUBE-NODEPORT-CONTAINER {head} 30080 -j REDIRECT --to-ports 40000",
        f"-A KUBE-NODEPORT-HOST {head} 30080 -j REDIRECT --to-ports 40000",
        "COMMIT",
        "*filter",
        f"-A KUBE-NODEPORT-NON-LOCAL {head} 40000 -m conntrack --ctstate NEW -j ACCEPT",
        "COMMIT",
    ]


def test_external_ips_are_redirected_unless_bridged_or_elsewhere() -> None:
    text = batch.iptables_change([], redirects(service(external_ips="198.51.100.1")))
    assert text.count("-m physdev ! --physdev-is-in") == 1
    assert text.count("-d 198.51.100.1 -m addrtype --dst-type LOCAL") == 2


def test_a_source_range_limits_the_load_balancer_ip() -> None:
    of = service(load_balancer_ips="203.0.113.1", source_ranges="198.51.100.0/24")
    assert "-d 203.0.113.1 -s 198.51.100.0/24 -j REDIRECT" in batch.iptables_change([], redirects(of))
    element = "198.51.100.0/24 . 203.0.113.1 . tcp . 80 : 40000"
    assert element in commands_text(batch.nft_change(Family.IPV4, [], redirects(of)))


def test_nft_elements() -> None:
    text = commands_text(batch.nft_change(Family.IPV4, [], redirects(service("web", "80@30080"))))
    assert text.splitlines() == [
        "add element ip kproxy-userspace vips { 10.96.0.1 . tcp . 80 : 40000 }",
        "add element ip kproxy-userspace node-ports { tcp . 30080 : 40000 }",
    ]


def test_ranges_within_others_are_omitted() -> None:
    ranges = "198.51.100.0/24 198.51.0.0/16 198.51.0.0/16 192.0.2.7/32"
    of = service(load_balancer_ips="203.0.113.1", source_ranges=ranges)
    found = [portal.source for portal in relay(of).portals if portal.source]
    assert list(map(str, found)) == ["192.0.2.7/32", "198.51.0.0/16"]


def test_relays_at_one_address_are_reached_by_dnat() -> None:
    at = parse_address("192.0.2.1")
    bound = [redirect._replace(at=at) for redirect in redirects(service("web", "80@30080"))]
    assert batch.iptables_change([], bound).count("-j DNAT --to-destination 192.0.2.1:40000") == 4
    text = commands_text(batch.nft_creation(Family.IPV4, bound, at))
    assert text.count("dnat to 192.0.2.1:") == 6


def test_with_listen_there_are_relays_at_the_ports_themselves() -> None:
    (plan,) = plans(NODE, service("web", "80@30080")).values()
    found = wanted(plan, NODE, parse_address("127.0.0.1"))
    assert [name.port for name in found] == [80, 30080]
    assert all(relay.portals == () for relay in found.values())
    assert wanted(plan, NODE, parse_address("::1")) == {}
