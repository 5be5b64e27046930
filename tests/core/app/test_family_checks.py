"""Warnings when configuration, node and machine disagree about IP families."""

import pytest

from kproxy_conformance.builders import addresses, cidrs
from kproxy_core.app.family_checks import doubts, unservable
from kproxy_core.config.file import API_VERSION, decode
from kproxy_core.config.flags import Flags
from kproxy_core.config.settings import Config, resolve
from kproxy_core.contract.values import Description
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeObject
from kproxy_core.modes.settings import node_settings
from kproxy_core.sync.node_facts import primary_family

V4, V6 = Family.IPV4, Family.IPV6
EVERYWHERE = "nodePortAddresses is unset: node ports are served on all local addresses; consider `primary`"
ONLY_IPV4 = (
    "nodePortAddresses has only IPv4: IPv6 node ports are not served; add ::/0 to serve them on all"
    " addresses, as kube-proxy does")
ONLY_IPV6 = (
    "nodePortAddresses has only IPv6: IPv4 node ports are not served; add 0.0.0.0/0 to serve them on all"
    " addresses, as kube-proxy does")
FOUR = NodeObject("node1", addresses=addresses("192.0.2.1 2001:db8::1"))
SIX = NodeObject("node1", addresses=addresses("2001:db8::1 192.0.2.1"))


def config_of(text: str) -> Config:
    return resolve(Flags(), decode(f"{{apiVersion: {API_VERSION}, kind: KubeProxyConfiguration, {text}}}"))


@pytest.mark.parametrize(
    ("bind", "node", "wanted"),
    [
        ("", None, V4),
        ("", FOUR, V4),
        ("", SIX, V6),
        ("", NodeObject("node1"), V4),
        ("192.0.2.9", SIX, V4),
        ("2001:db8::9", FOUR, V6),
    ],
)
def test_the_primary_family(bind: str, node: NodeObject | None, wanted: Family) -> None:
    assert primary_family(addresses(bind)[0] if bind else None, node) is wanted


@pytest.mark.parametrize(
    ("text", "families", "problem"),
    [
        ("clusterCIDR: fd00::/8", (V4,), "this machine is IPv4-only, but clusterCIDR has only IPv6"),
        ("clusterCIDR: fd00::/8", (V4, V6), ""),
        ("clusterCIDR: 'fd00::/8,10.0.0.0/8'", (V4,), ""),
        ("clusterCIDR: fd00::/8, detectLocalMode: NodeCIDR", (V4,), ""),
        ("bindAddress: fd00::1", (V4,), "bindAddress is IPv6, which this machine does not have"),
        ("bindAddress: fd00::1", (V4, V6), ""),
        ("bindAddress: '::'", (V4,), ""),
    ],
)
def test_an_unusable_family_ends_the_start(text: str, families: tuple[Family, ...], problem: str) -> None:
    assert unservable(config_of(text), families) == problem


@pytest.mark.parametrize(
    ("text", "families", "node", "wanted"),
    [
        ("", (V4, V6), FOUR, [EVERYWHERE]),
        ("nodePortAddresses: [primary]", (V4, V6), FOUR, []),
        ("nodePortAddresses: [all]", (V4, V6), FOUR, []),
        ("nodePortAddresses: [localhost]", (V4, V6), FOUR, []),
        ("nodePortAddresses: [10.0.0.0/8, primary]", (V4, V6), FOUR, []),
        ("nodePortAddresses: ['fd00::/8']", (V4, V6), FOUR,
         [ONLY_IPV6]),
        ("nodePortAddresses: [10.0.0.0/8]", (V4, V6), FOUR, [ONLY_IPV4]),
        ("nodePortAddresses: [10.0.0.0/8]", (V4,), FOUR, []),
        ("nodePortAddresses: [10.0.0.0/8]", (V4, V6), NodeObject("n", addresses=addresses("192.0.2.1")), []),
        ("nodePortAddresses: [10.0.0.0/8], clusterCIDR: '10.0.0.0/8,fd00::/8'", (V4, V6), None, [ONLY_IPV4]),
        ("nodePortAddresses: [10.0.0.0/8, '::/0']", (V4, V6), FOUR, []),
        ("nodePortAddresses: [primary], clusterCIDR: 10.0.0.0/8", (V4, V6), SIX,
         ["the cluster is IPv6-primary, but clusterCIDR has only IPv4"]),
        ("nodePortAddresses: [primary]", (V4, V6), NodeObject("n", pod_cidrs=cidrs("fd00::/64")),
         ["the cluster is IPv4-primary, but the pod networks of the Node are only IPv6"]),
        ("nodePortAddresses: [primary], metricsBindAddress: '[::1]:1'", (V4,), SIX,
         ["the cluster is IPv6-only, but this machine does not have IPv6"]),
        ("nodePortAddresses: [primary], detectLocalMode: NodeCIDR", (V4, V6), FOUR,
         ["detectLocalMode is NodeCIDR, but the Node has no pod networks yet"]),
        ("nodePortAddresses: [primary], mode: ipvs, ipvs: {excludeCIDRs: ['fd00::/8']}", (V4,), FOUR,
         ["the cluster is IPv4-only, but excludeCIDRs has only IPv6"]),
        ("nodePortAddresses: [primary], mode: ipvs, ipvs: {excludeCIDRs: ['fd00::/8']}", (V4, V6), None, []),
        ("nodePortAddresses: [primary], healthzBindAddress: '[fd00::1]:1', metricsBindAddress: '[::]:2'",
         (V4,), FOUR, ["the cluster is IPv4-only, but healthzBindAddress is IPv6"]),
        ("nodePortAddresses: [primary], metricsBindAddress: '[::1]:2'", (V4,), None,
         ["the cluster is IPv4-only, but metricsBindAddress is IPv6"]),
    ],
)
def test_doubts_are_reported(
    text: str, families: tuple[Family, ...], node: NodeObject | None, wanted: list[str]
) -> None:
    config = config_of(text)
    settings = node_settings(config, Description("any", "", (1, 0)))
    assert list(doubts(config, settings, families, node)) == wanted


def test_a_mode_may_have_a_default_of_its_own() -> None:
    config = config_of("")
    settings = node_settings(config, Description("any", "", (1, 0), default_node_port_addresses=("primary",)))
    assert list(doubts(config, settings, (V4, V6), FOUR)) == []
