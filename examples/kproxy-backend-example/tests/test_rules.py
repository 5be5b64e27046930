"""The nftables rules for service plans. The kit tests everything else."""

from collections.abc import Mapping

import pytest
from kproxy_plain.rules import Rules, base_rules, commands, parse_table, service_rules, table_text, together

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan

NODE = node_view("node1", pods="10.1.0.0/16", node_port_addresses="192.0.2.1")
MARK = "meta mark set meta mark | 0x00004000"
WEB = plans(NODE, service("web", "http:80@30080"), endpoint_slice("web", "10.1.0.5", ports=["http:8080"]))
SHOP = plans(
    NODE,
    service(
        "shop", load_balancer_ips="203.0.113.1", source_ranges="192.0.2.0/24 192.0.2.7/32", ip="10.96.0.2"
    ),
    endpoint_slice("shop", endpoint("10.1.0.5", "node1"), endpoint("10.1.1.6", "node2")),
)
GONE = plans(NODE, service("gone"))


def rules(*found: Mapping[ServicePortKey, ServicePlan]) -> Rules:
    return together(service_rules(plan, NODE, 14) for some in found for plan in some.values())


@pytest.mark.parametrize(
    ("found", "chain", "lines"),
    [
        (WEB, "cluster/default/web/http/tcp",
         (f"ip saddr != 10.1.0.0/16 {MARK}", "meta l4proto tcp dnat to 10.1.0.5:8080")),
        (WEB, "external/default/web/http/tcp", (MARK, "meta l4proto tcp dnat to 10.1.0.5:8080")),
        (SHOP, "ranges/default/shop/-/tcp",
         ("ip saddr != 192.0.2.0/24 drop", "goto external/default/shop/-/tcp")),
        (GONE, "cluster/default/gone/-/tcp", (f"ip saddr != 10.1.0.0/16 {MARK}", "reject with tcp reset")),
    ],
)  # fmt: skip
def test_chain(found: Mapping[ServicePortKey, ServicePlan], chain: str, lines: tuple[str, ...]) -> None:
    assert rules(found).chains[chain] == lines


def test_frontends_jump_to_chains() -> None:
    assert rules(WEB, SHOP).elements == {
        ("frontends", "10.96.0.1 . tcp . 80"): "goto cluster/default/web/http/tcp",
        ("node-ports", "tcp . 30080"): "goto external/default/web/http/tcp",
        ("frontends", "10.96.0.2 . tcp . 80"): "goto cluster/default/shop/-/tcp",
        ("frontends", "203.0.113.1 . tcp . 80"): "goto ranges/default/shop/-/tcp",
    }


def test_a_written_table_is_parsed_back() -> None:
    whole = together([base_rules(NODE, 14), rules(WEB, SHOP)])
    assert parse_table(table_text(Family.IPV4, whole)) == whole


def test_a_listing_of_nft_1_1_means_the_same() -> None:
    """It names the priority of the output hook."""
    text = table_text(Family.IPV4, Rules(dict(base_rules(NODE, 14).chains)))
    listed = text.replace("hook output priority -100;", "hook output priority dstnat;")
    assert listed != text
    assert parse_table(listed) == parse_table(text)


def test_equal_rules_need_no_commands() -> None:
    assert commands(Family.IPV4, rules(WEB), rules(WEB)) == ""
    assert commands(Family.IPV4, rules(WEB), rules(SHOP)) != ""
