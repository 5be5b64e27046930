"""Senders whose packets iptables sees on a bridge's port."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.linux import sysctl
from kproxy_core.model.address import Family, parse_address
from kproxy_userspace.kernel.portals import bridged_sources

SETTINGS = ("net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables")
BEHIND = {Family.IPV4: "10.1.0.9", Family.IPV6: "fd00:1::9"}
BESIDE = {Family.IPV4: "10.2.0.9", Family.IPV6: "fd00:2::9"}
WITHOUT_A_ROUTE = {Family.IPV4: "192.0.2.1", Family.IPV6: "2001:db8::1"}


@pytest.fixture
def node() -> Iterator[Namespace]:
    """A node with a bridge and a plain veth; the test's thread is there."""
    with closing(Namespace("node")) as node, closing(Namespace("pod")) as pod, node.entered():
        node.add_veth("behind", pod, "eth0")
        node.add_veth("beside", pod, "eth1")
        node.add_bridge("bridge0", "behind")
        for number, device in ((1, "bridge0"), (2, "beside")):
            node.add_address(f"10.{number}.0.1/24", device)
            node.add_address(f"fd00:{number}::1/64", device)
        yield node


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize(
    ("everywhere", "of_bridge", "is_bridged"), [(1, 0, True), (0, 1, True), (1, 1, True), (0, 0, False)])
def test_senders_behind_a_bridge_that_shows_packets_to_iptables_are_bridged(
    node: Namespace, family: Family, everywhere: int, of_bridge: int, is_bridged: bool
) -> None:
    for name, kind in zip(SETTINGS, ("nf_call_iptables", "nf_call_ip6tables"), strict=True):
        sysctl.ensure(name, everywhere)
        node.run("ip", "link", "set", "bridge0", "type", "bridge", kind, str(of_bridge))
    asked = [parse_address(each[family]) for each in (BEHIND, BESIDE, WITHOUT_A_ROUTE)]
    assert bridged_sources(asked, family) == (frozenset(asked[:1]) if is_bridged else frozenset())
