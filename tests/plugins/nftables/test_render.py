"""The elements and rules of each kind of Service, as nft text."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.model.address import Protocol
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_core.model.service import Service
from kproxy_nftables.names import Template, parse_template
from kproxy_nftables.render import render_text
from kproxy_nftables.settings import Settings

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
LOCAL = endpoint("10.244.1.5", "node1")
REMOTE = endpoint("10.244.2.5", "node2")


def from_pods(**source: str) -> NodeView:
    """Return a node that recognises its pods by the *source* of their traffic."""
    return replace(node_view(), local_source=LocalSource(**source))  # type: ignore[arg-type]


def elements_of(text: str) -> dict[str, list[str]]:
    """Return the elements by container in rendered *text*."""
    found = re.findall(r"add element ip6? kproxy (\S+) \{\n(.*?)\n\}", text, re.DOTALL)
    return {name: [line.strip(" ,") for line in body.splitlines()] for name, body in found}


def rendered(svc: Service, *endpoints: object, node: NodeView = NODE) -> dict[str, list[str]]:
    piece = endpoint_slice(str(svc.name), *endpoints)  # type: ignore[arg-type]
    return elements_of(render_text(full_update(node, plans(node, svc, piece))))


def rules_of(text: str, chain: str) -> list[str]:
    """Return the rules of one *chain* in rendered *text*."""
    prefix = f"add rule ip kproxy {chain} "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


LB: dict[str, Any] = {"external_ips": "198.51.100.1", "load_balancer_ips": "203.0.113.1"}

VERDICTS = [
    # service, endpoints, container, key and verdict
    ("ClusterIP", service(), (LOCAL, REMOTE), "vips", "10.96.0.1 . tcp . 80 : goto tcp-cluster-2"),
    ("no endpoint", service(), (), "vips", "10.96.0.1 . tcp . 80 : goto reject-traffic"),
    ("internal Local", service(internal_local=True), (LOCAL, REMOTE), "vips",
     "10.96.0.1 . tcp . 80 : goto tcp-local-1"),
    ("internal Local, none here", service(internal_local=True), (REMOTE,), "vips",
     "10.96.0.1 . tcp . 80 : drop"),
    ("external IP", service(**LB), (LOCAL, REMOTE), "vips", "198.51.100.1 . tcp . 80 : goto tcp-external-2"),
    ("load balancer IP", service(**LB), (LOCAL, REMOTE), "vips",
     "203.0.113.1 . tcp . 80 : goto tcp-external-2"),
    ("external Local", service(external_local=True, **LB), (LOCAL, REMOTE), "vips",
     "203.0.113.1 . tcp . 80 : goto tcp-external-local-2-1"),
    ("external Local, none here", service(external_local=True, **LB), (REMOTE,), "vips",
     "203.0.113.1 . tcp . 80 : goto tcp-external-local-1-0"),
    ("external Local leaves the ClusterIP alone", service(external_local=True, **LB), (REMOTE,), "vips",
     "10.96.0.1 . tcp . 80 : goto tcp-cluster-1"),
    ("external, no endpoint", service(external_local=True, **LB), (), "vips",
     "203.0.113.1 . tcp . 80 : goto reject-traffic"),
    ("node port", service("web", "80@30080"), (REMOTE,), "nodeports",
     "tcp . 30080 : goto tcp-nodeport-external-1"),
    ("node port, external Local", service("web", "80@30080", external_local=True), (LOCAL, REMOTE),
     "nodeports", "tcp . 30080 : goto tcp-nodeport-external-local-2-1"),
    ("node port, no endpoint", service("web", "80@30080"), (), "nodeports",
     "tcp . 30080 : goto reject-traffic"),
    ("UDP", service("dns", "53/UDP"), (endpoint("10.244.1.5"),), "vips",
     "10.96.0.1 . udp . 53 : goto reject-traffic"),
    ("affinity", service(affinity=10800), (REMOTE,), "vips",
     "10.96.0.1 . tcp . 80 : goto tcp-cluster-1-sticky"),
    ("index 0", service(), (REMOTE,), "tcp-vip-endpoints", "10.96.0.1 . 80 . 0 : 10.244.2.5 . 8080"),
    ("local endpoints", service(internal_local=True), (LOCAL, REMOTE), "tcp-vip-local-endpoints",
     "10.96.0.1 . 80 . 0 : 10.244.1.5 . 8080"),
    ("local endpoints of a node port", service("web", "80@30080", external_local=True), (LOCAL, REMOTE),
     "tcp-nodeport-local-endpoints", "30080 . 0 : 10.244.1.5 . 8080"),
    ("hairpin", service(), (LOCAL, REMOTE), "hairpins", "10.244.1.5 . 10.244.1.5"),
    ("active ClusterIP", service(), (), "cluster-ips", "10.96.0.1"),
    ("node address", service(), (), "node-ips", "192.0.2.1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("svc", "endpoints", "container", "expected"), [v[1:] for v in VERDICTS], ids=[v[0] for v in VERDICTS]
)
def test_element(svc: Service, endpoints: tuple[object, ...], container: str, expected: str) -> None:
    assert expected in rendered(svc, *endpoints)[container]


def test_remote_endpoints_need_no_hairpin() -> None:
    assert "hairpins" not in rendered(service(), REMOTE)


def test_source_ranges_apply_to_the_load_balancer_ip_only() -> None:
    svc = service(source_ranges="192.0.2.0/24 198.51.100.7/32", **LB)
    found = rendered(svc, REMOTE)
    (to_ranges,) = [e for e in found["vips"] if e.startswith("203.0.113.1")]
    chain = to_ranges.partition("goto ")[2]
    assert chain.startswith("ranges-")
    assert found["admitted-vips"] == ["203.0.113.1 . tcp . 80 : goto tcp-external-1"]
    assert "198.51.100.1 . tcp . 80 : goto tcp-external-1" in found["vips"]
    text = render_text(full_update(NODE, plans(NODE, svc, endpoint_slice("web", REMOTE))))
    assert rules_of(text, chain)[-1] == "drop"
    # 192.0.2.0/24 is not the node's (no node IP known), so nothing but the ranges gets in.
    assert rules_of(text, chain)[:-1] == [
        "ip saddr 192.0.2.0/24 goto admitted", "ip saddr 198.51.100.7/32 goto admitted"
    ]  # fmt: skip


def test_affinity_is_shared_by_all_frontends_unless_a_policy_is_local() -> None:
    shared = rendered(service("web", "80@30080", affinity=60, **LB), REMOTE)
    targets = {e.partition(": ")[2] for e in shared["sticky-vips"] + shared["sticky-nodeports"]}
    assert len(targets) == 1
    assert "sticky-local-vips" not in shared


@pytest.mark.parametrize(
    ("policies", "cluster_ip", "from_inside", "from_outside"),
    [
        ({"internal_local": True}, "local", "cluster", ""),
        ({"external_local": True}, "cluster", "cluster", "local"),
        ({"internal_local": True, "external_local": True}, "local", "cluster", "local"),
    ],
    ids=["internal", "external", "both"],
)
def test_a_local_policy_separates_affinity_groups(
    policies: dict[str, Any], cluster_ip: str, from_inside: str, from_outside: str
) -> None:
    found = rendered(service("web", "80@30080", affinity=60, **policies, **LB), LOCAL, REMOTE)

    def group(container: str, start: str) -> str:
        return next((e.rpartition("/")[2] for e in found.get(container, ()) if e.startswith(start)), "")

    assert group("sticky-vips", "10.96.0.1") == cluster_ip
    assert group("sticky-vips", LB["load_balancer_ips"]) == group("sticky-nodeports", "tcp") == from_inside
    assert group("sticky-local-vips", LB["load_balancer_ips"]) == from_outside
    assert group("sticky-local-nodeports", "tcp") == from_outside
    assert len({e.partition(": ")[2] for e in found["recorded-vips"] + found["recorded-nodeports"]}) == 1


@pytest.mark.parametrize(
    ("node", "masquerade"),
    [
        (
            node_view(pods="10.244.1.0/24"),
            ["ip saddr != 10.244.1.0/24 meta mark set meta mark or 0x00004000"],
        ),
        (node_view(), []),
        (node_view(masquerade_all=True), ["meta mark set meta mark or 0x00004000"]),
        (from_pods(interface="cbr0"), ['iifname != "cbr0" meta mark set meta mark or 0x00004000']),
        (from_pods(interface_prefix="veth"), ['iifname != "veth*" meta mark set meta mark or 0x00004000']),
    ],
    ids=["outside only", "unknown", "all", "not from the bridge", "not by prefix"],
)
def test_traffic_to_cluster_ips_is_masqueraded(node: NodeView, masquerade: list[str]) -> None:
    text = render_text(full_update(node, plans(node, service(), endpoint_slice("web", REMOTE))))
    assert rules_of(text, "tcp-cluster-1")[:-1] == masquerade


def test_rules_do_not_depend_on_the_number_of_services() -> None:
    def rules(count: int) -> int:
        wanted = {}
        for number in range(count):
            svc = service(f"web{number}", ip=f"10.96.{number >> 8}.{number & 255}")
            wanted.update(plans(NODE, svc, endpoint_slice(f"web{number}", REMOTE)))
        return render_text(full_update(NODE, wanted)).count("add rule")

    assert rules(1) == rules(1000)


def test_rules_count_only_if_traffic_is_counted() -> None:
    update = full_update(NODE, plans(NODE, service(), endpoint_slice("web", REMOTE)))
    plain, counted = render_text(update), render_text(update, Settings(counted=True))
    assert "counter" not in plain
    added = [line for line in counted.splitlines() if line not in plain.splitlines()]
    assert len([line for line in added if " counter }" in line]) == len(Protocol) + 1
    assert elements_of(counted) == elements_of(plain)


TEMPLATES = st.builds(
    lambda protocol, policy, n, m, sticky, node_port: Template(
        protocol,
        policy,
        0 if policy == "local" else n,
        m if policy == "external-local" else n if policy == "local" else 0,
        sticky,
        node_port,
    ),
    st.sampled_from(Protocol),
    st.sampled_from(["cluster", "local", "external", "external-local", "short-circuit"]),
    st.integers(1, 5000), st.integers(0, 5000), st.booleans(), st.booleans(),
)  # fmt: skip


@given(TEMPLATES)
def test_a_templates_name_encodes_it(template: Template) -> None:
    assert parse_template(template.name) == template


@pytest.mark.parametrize(
    "name", ["services", "drop", "cluster-", "cluster-x", "pin-tcp-cluster-1", "cluster-1", ""]
)
def test_other_names_are_not_templates(name: str) -> None:
    assert parse_template(name) is None
