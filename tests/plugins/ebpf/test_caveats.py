"""The deviations that the mode announces."""

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Service
from kproxy_ebpf.detect import caveats
from kproxy_ebpf.settings import Settings

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
MASQUERADING = node_view("node1", pods="10.244.1.0/24", masquerade_all=True)
ANYWHERE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", anywhere=True)

LEFT = "sockets of pods are left to the rules"
OWN_SOURCE = "pods reach external frontends with their own address as source"
CONTAINERS = "containers of this machine that are not of this cluster are translated too"
AFFINITY = "session affinity tells clients apart by network namespace, not by address"
RESETS = "connections of pods are left to the rules, which reset those to removed endpoints"
LOOPBACK = "node port 30080 is served on 127.0.0.1 to the node itself"


@pytest.mark.parametrize(
    ("node", "what", "clients", "whole_node", "expected"),
    [
        (NODE, service(), "auto", False, []),
        (NODE, service(), "auto", True, [CONTAINERS]),
        (NODE, service(), "all", True, [OWN_SOURCE, CONTAINERS]),
        (NODE, service(), "node", True, [LEFT]),
        (MASQUERADING, service(), "auto", True, [LEFT]),
        (MASQUERADING, service(), "all", True, [LEFT]),
        (NODE, service(affinity=60), "auto", False, [AFFINITY]),
        (ANYWHERE, service("web", "80@30080"), "auto", False, [LOOPBACK]),
        (NODE, service("web", "80/SCTP"), "all", True, []),
        (NODE, service(removed_endpoints="reset"), "auto", False, [RESETS]),
        (NODE, service("dns", "53/UDP", removed_endpoints="reset"), "auto", False, []),
    ],
)
def test_caveats(node: NodeView, what: Service, clients: str, whole_node: bool, expected: list[str]) -> None:
    update = full_update(node, plans(node, what, endpoint_slice("web", "10.244.2.1")))
    found = list(caveats(update, Settings(cgroup="" if whole_node else "/pods", clients=clients)))
    assert [caveat.what for caveat in found] == expected
    assert not any(caveat.lost for caveat in found)


def test_without_what_sockets_dialled_the_node_keeps_its_connections() -> None:
    update = full_update(
        NODE, plans(NODE, service(removed_endpoints="reset"), endpoint_slice("web", "10.244.2.1")))
    lost = [each.what for each in caveats(update, Settings("/pods", stores_peers=False)) if each.lost]
    assert lost == ["connections of the node itself to removed endpoints are not reset without getpeername"]


NOT_SERVED = "node port 30080 is not served on 127.0.0.1"


@pytest.mark.parametrize(("protocol", "connected_udp", "announced"), [
    ("TCP", "rules", False), ("UDP", "destroy", False), ("UDP", "rules", True),
])
def test_what_the_rules_do_not_serve_on_loopback_is_announced_only_where_programs_leave_it(
    protocol: str, connected_udp: str, announced: bool
) -> None:
    of = service("web", f"80/{protocol}@30080")
    pieces = endpoint_slice("web", "10.244.2.1", ports=(f"8080/{protocol}",))
    found = Registry().caveats("ebpf", full_update(ANYWHERE, plans(ANYWHERE, of, pieces)),
                               BackendSettings((Family.IPV4,), options={"connectedUdp": connected_udp}))
    assert (NOT_SERVED in [caveat.what for caveat in found]) is announced
