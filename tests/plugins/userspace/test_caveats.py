"""Deviations of the userspace mode."""

import pytest

from kproxy_conformance.builders import full_update, node_view, plans, service
from kproxy_core.contract.values import BackendSettings, Caveat
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Service
from kproxy_core.plan.service_plan import plan_service
from kproxy_userspace.hooks import kproxy_caveats

NODE = node_view(anywhere=True)
OF_RELAYS = [
    Caveat("endpoints see an address of this node as that of every client"),
    Caveat("connections end with the kproxy process, and none are made until it runs again"),
]
OTHER_PORTS = Caveat("connections to other ports of ClusterIPs are not refused", lost=False)


def found(node: NodeView, of: Service, **options: object) -> list[Caveat]:
    update = full_update(node, plans(node, of))
    return list(kproxy_caveats(update, BackendSettings((node.family,), options=options)))


def test_relays_hide_clients_and_end_with_their_process() -> None:
    assert found(NODE, service("shop/web", "80@30080")) == [OTHER_PORTS, *OF_RELAYS]
    assert list(kproxy_caveats(full_update(NODE, {}), BackendSettings((Family.IPV4,)))) == []


@pytest.mark.parametrize(("of", "expected"), [
    (service("shop/web", affinity=60), []),
    (service("shop/web", "9/SCTP"), [("SCTP is not relayed", True)]),
    (service("shop/web", internal_local=True), []),
    (service("shop/web", internal_local=True, external_ips="198.51.100.1"),
     [("the internal traffic policy Local is ignored", True)]),
    (service("shop/web", external_local=True, external_ips="203.0.113.1"),
     [("the external traffic policy Local is ignored", True)]),
], ids=["affinity", "SCTP", "ClusterIP Local", "internal Local", "external Local"])  # fmt: skip
def test_unsupported_fields_of_a_service(of: Service, expected: list[tuple[str, bool]]) -> None:
    caveats = [caveat for caveat in found(NODE, of) if caveat.service_port is not None]
    assert [(caveat.what, caveat.lost) for caveat in caveats] == expected


def test_relays_try_another_endpoint_instead_of_quarantine() -> None:
    update = full_update(NODE, {
        plan.key: plan for plan in plan_service(service("shop/web"), {}, NODE, quarantined={})})
    caveats = kproxy_caveats(update, BackendSettings((NODE.family,)))
    (caveat,) = [each for each in caveats if each.service_port is not None]
    assert "not put into quarantine" in caveat.what
    assert not caveat.lost


def test_an_idle_udp_client_is_forgotten() -> None:
    udp = service("shop/dns", "53/UDP")
    assert found(NODE, udp)[-1] == Caveat(
        "a UDP client that was idle for 0.25 s may reach another endpoint", lost=False)
    assert "for 90 s" in found(NODE, udp, udpIdleTimeout="1.5m")[-1].what


def test_node_ports_are_served_at_the_selected_addresses_and_on_loopback() -> None:
    assert not [c for c in found(NODE, service("shop/web", "80@30080")) if "node port" in c.what]
    chosen = found(node_view(node_port_addresses="192.0.2.1"), service("shop/web", "80@30080"))
    assert [caveat.what for caveat in chosen if "node port" in caveat.what] == [
        "IPv4 node ports are served on 192.0.2.1 only",
        "IPv4 node ports are not served on local addresses that no interface has",
        "node port 30080 is not served on 127.0.0.1",
    ]


def test_one_address_for_all_services() -> None:
    assert found(NODE, service("shop/web", "80@30080"), listen="127.0.0.1") == [
        Caveat("Services are served at 127.0.0.1 and at no address of their own"), *OF_RELAYS]
    assert found(NODE, service("shop/web"), listen="::1")[0] == Caveat("IPv4 Services are not served")
