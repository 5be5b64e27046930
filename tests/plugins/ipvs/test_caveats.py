"""The caveats of the ipvs mode."""

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.values import BackendSettings, Caveat
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Service
from kproxy_ipvs.hooks import kproxy_caveats

NODE = node_view(anywhere=True, node_port_addresses="192.0.2.1")
OF_ALL = [
    Caveat("connections are scheduled by rr", lost=False),
    Caveat("ClusterIPs and external addresses are addresses of this node and answer pings", lost=False),
]


def found(node: NodeView, of: Service, **options: object) -> list[Caveat]:
    update = full_update(node, plans(node, of))
    return list(kproxy_caveats(update, BackendSettings((node.family,), options=options)))


def test_scheduler_and_addresses_are_caveats_of_every_service() -> None:
    assert found(NODE, service()) == OF_ALL
    by_load = Caveat("connections are scheduled by lc", lost=False, only_here=True)
    assert by_load in found(NODE, service(), scheduler="lc")
    assert list(kproxy_caveats(full_update(NODE, {}), BackendSettings((Family.IPV4,)))) == []


def test_node_ports_are_served_at_interface_addresses_only() -> None:
    caveats = found(NODE, service("shop/web", "80@30080"))
    assert [(caveat.what, caveat.lost) for caveat in caveats if caveat not in OF_ALL] == [
        ("IPv4 node ports are not served on local addresses that no interface has", True),
        ("node port 30080 is not served on 127.0.0.1", True),
    ]


def test_node_ports_are_served_on_loopback_where_it_is_named() -> None:
    caveats = found(replace(NODE, relays_node_ports=True), service("shop/web", "80@30080"))
    assert [caveat.what for caveat in caveats if caveat.service_port] == []


@pytest.mark.parametrize(("of", "expected"), [
    (service("shop/web", affinity=10800), []),
    (service("shop/web", affinity=60),
     ["session affinity outlasts its 60 s while connections of the client are in TIME_WAIT"]),
    (service("shop/web", "53/UDP", affinity=60), []),
    (service("shop/web", affinity=10800, external_ips="203.0.113.1"),
     ["session affinity is kept for each frontend by itself"]),
    (service("shop/web", affinity=10800, external_local=True, external_ips="203.0.113.1"),
     ["session affinity is kept for each frontend by itself",
      "session affinity of this node and its pods at external frontends ends when endpoints change"]),
    (service("shop/web", "9/SCTP"), ["SCTP is served if the IPVS of this kernel has it"]),
    (service("shop/web", internal_local=True, external_local=True, external_ips="203.0.113.1"), []),
    (service("shop/web", hash_by="flow"),
     ["IPVS hashes clients in a way of its own: nodes in other modes choose other endpoints"]),
], ids=["affinity", "short affinity", "UDP", "frontends", "Local", "SCTP", "no affinity",
        "hash"])  # fmt: skip
def test_caveats_of_affinity_and_protocols(of: Service, expected: list[str]) -> None:
    caveats = [caveat for caveat in found(NODE, of) if caveat not in OF_ALL]
    assert [caveat.what for caveat in caveats] == expected
    assert all(str(caveat.service_port) == "shop/web" for caveat in caveats)


@pytest.mark.parametrize(("scheduler", "expected"), [
    ("rr", []), ("sed", []), ("dh", [
    "the scheduler dh ignores weights, and connections to endpoints of weight 0 end"])])
def test_one_scheduler_ignores_weights(scheduler: str, expected: list[str]) -> None:
    slices = [endpoint_slice("web", f"10.1.1.{n}", name=f"web-{n}", weight=n) for n in (1, 2)]
    update = full_update(NODE, plans(NODE, service("web"), *slices))
    settings = BackendSettings((Family.IPV4,), options={"scheduler": scheduler})
    assert [caveat.what for caveat in kproxy_caveats(update, settings) if caveat.service_port] == expected
