"""The checks of ``kproxy doctor``, as tables: the state of a node, and what is found in it."""

from collections.abc import Mapping
from typing import Any

import pytest

from kproxy_conformance.builders import destinations
from kproxy_core.app.doctor import (
    Finding,
    ServedPort,
    Services,
    findings,
    narrowed,
    pod_links,
    samples,
    unclear,
)
from kproxy_core.linux.links import Link
from kproxy_core.linux.node_state import LinkAddress, NodeState, Process
from kproxy_core.model.address import Family, Protocol, parse_address, parse_cidr
from kproxy_core.nft.listing import TableName

SETTINGS = {
    "net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
    "net/bridge/bridge-nf-call-iptables": "1", "net/bridge/bridge-nf-call-ip6tables": "1",
    "net/netfilter/nf_conntrack_count": "899", "net/netfilter/nf_conntrack_max": "1000",
    "net/ipv4/ip_local_port_range": "32768\t60999", "net/ipv4/ip_local_reserved_ports": "",
    "net/ipv4/conf/all/rp_filter": "0",
}  # fmt: skip
UPLINK = Link(2, "eth0", "")
BRIDGE = Link(3, "cni0", "bridge")
POD = Link(4, "veth1", "veth", master=3, leads_elsewhere=True, has_hairpin=True)
VIP = parse_address("10.96.0.1")
SERVICES = Services("mode", True, ((30080, "shop/web"),), (parse_address("10.1.2.3"),))


def address(link: int, text: str) -> LinkAddress:
    host, _, prefix = text.partition("/")
    packed = parse_address(host)
    return LinkAddress(link, packed, parse_cidr(f"{host.rpartition('.')[0]}.0/{prefix}"))


CLEAN = NodeState(
    kernel="6.1.0-26-amd64", settings=SETTINGS,
    links=(Link(1, "lo", "", is_loopback=True), UPLINK, BRIDGE, POD),
    addresses=(address(2, "192.0.2.1/24"), address(3, "10.1.1.1/24")), uplinks={Family.IPV4: "eth0"},
    routes={parse_address("10.1.2.3"): "eth0"})  # fmt: skip


def setting(**values: str) -> dict[str, Any]:
    return {"settings": SETTINGS | {name.replace("__", "/"): value for name, value in values.items()}}


def links(*more: Link) -> dict[str, Any]:
    numbers = {link.number for link in more}
    return {"links": (*(link for link in CLEAN.links if link.number not in numbers), *more)}


HAZARDS: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "conntrack": (
        setting(net__netfilter__nf_conntrack_count="900"), "conntrack",
        "net.netfilter.nf_conntrack_count = 900"),
    "node port": (
        setting(net__ipv4__ip_local_port_range="30000\t60999"), "node-ports", "node port 30080 of shop/web"),
    "MTU of the uplink": (
        links(UPLINK._replace(mtu=1450)), "mtu", "eth0 has an MTU of 1450"),
    "MTU of a tunnel": (
        links(Link(5, "flannel.1", "vxlan", mtu=1450)), "mtu", "flannel.1 has an MTU of 1450"),
    "clock": ({"is_clock_synchronized": False}, "clock", "adjtimex(2): the clock is not synchronized"),
    "cgroup": ({"cgroup_v1": "/sys/fs/cgroup"}, "cgroup", "cgroup v1 is mounted at /sys/fs/cgroup"),
    "kernel": ({"kernel": "6.6.57"}, "kernel", "Linux 6.6.57"),
    "Cilium": ({"has_socket_translation": True}, "second-proxy", "Cilium: it translates addresses of"),
    "kube-proxy": (
        {"proxies": (Process(7, "kube-proxy"),)}, "second-proxy", "kube-proxy: process 7 (kube-proxy)"),
    "its chains": ({"service_chains": ("ip nat",)}, "second-proxy", "kube-proxy: chain KUBE-SERVICES in"),
    "hairpin": (links(POD._replace(has_hairpin=False)), "hairpin", "hairpin is off at veth1"),
    "no br_netfilter": (
        {"settings": {name: value for name, value in SETTINGS.items() if "bridge" not in name}},
        "bridge-nf-call", "net.bridge.bridge-nf-call-iptables does not exist"),
    "a foreign table": (
        {"unread_tables": ("libnftables 1.0.6 crashes on table ip x",)}, "foreign-table", "libnftables"),
}  # fmt: skip


def found(**state: Any) -> list[Finding]:
    return findings(CLEAN._replace(**state), SERVICES)


@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard_is_found_once_with_evidence(name: str) -> None:
    state, check, evidence = HAZARDS[name]
    (finding,) = found(**state)
    assert finding.check == check
    assert any(line.startswith(evidence) for line in finding.evidence)
    assert finding.remedy


@pytest.mark.parametrize("state", [
    {},
    setting(
        net__ipv4__ip_local_port_range="30000\t60999", net__ipv4__ip_local_reserved_ports="80,30000-30100"),
    setting(net__ipv4__ip_local_port_range="what it is not"),
    setting(net__netfilter__nf_conntrack_count="900", net__netfilter__nf_conntrack_max="0"),
    setting(net__ipv4__conf__all__rp_filter="1"),
    setting(net__ipv6__conf__all__forwarding="0"),
    links(Link(5, "sit0", "sit", mtu=1400, is_up=False)),
    links(UPLINK._replace(mtu=9000)),
    links(BRIDGE._replace(name="docker0"), POD._replace(has_hairpin=False, mtu=9000)),
    links(BRIDGE._replace(is_promiscuous=True), POD._replace(has_hairpin=False)),
    setting(net__bridge__bridge_nf="") | links(BRIDGE._replace(calls=(True, True))),
    {"proxies": (Process(7, "cilium-agent"),)},
    {"tables": (TableName("ip", "kproxy"),)},
])  # fmt: skip
def test_what_does_no_harm_is_not_found(state: dict[str, Any]) -> None:
    assert found(**state) == []


@pytest.mark.parametrize(("release", "faulty"), [
    ("5.4.40", True), ("5.4.41-generic", False), ("5.6.12", True), ("5.6.13", False), ("5.5.19", True),
    ("4.19.123", False), ("3.10.0-1160.el7.x86_64", True), ("5.7.0-rc1", False), ("6.1.0-26-amd64", False),
    ("5.15.167", False), ("5.15.169", True), ("5.15.170", False), ("6.6.58", True), ("6.6.59", False),
    ("6.11.5", True), ("6.11.6", False), ("6.18.44-fc-v595", False), ("6.18", False),
])  # fmt: skip
def test_kernels_with_known_faults_are_told_by_their_release(release: str, faulty: bool) -> None:
    state = {"kernel": release, **links(Link(5, "flannel.1", "vxlan"))}
    assert [finding.check for finding in found(**state)] == ["kernel"] * faulty


def test_the_fault_of_vxlan_concerns_nodes_with_such_a_device() -> None:
    assert found(kernel="5.4.40") == []


def test_one_proxy_is_no_second_one() -> None:
    state = CLEAN._replace(
        proxies=(Process(7, "kube-proxy"),), service_chains=("ip nat", "ip6 nat"),
        tables=(TableName("ip", "kube-proxy"),))
    assert findings(state, None) == []
    assert findings(state, SERVICES._replace(is_running=False)) == []


@pytest.mark.parametrize("mode", ["iptables", "ipvs", "userspace"])
def test_chains_of_kube_proxys_names_may_be_those_of_kproxy(mode: str) -> None:
    state = CLEAN._replace(service_chains=("ip nat",))
    assert findings(state, SERVICES._replace(mode=mode)) == []


def test_strict_reverse_path_filters_matter_with_several_uplinks() -> None:
    state = CLEAN._replace(
        **setting(net__ipv4__conf__eth1__rp_filter="1"), **links(Link(6, "eth1", "")),
        addresses=(*CLEAN.addresses, address(6, "198.51.100.1/24")))
    (finding,) = findings(state, None)
    assert finding.check == "rp-filter"
    assert finding.evidence == [
        "rp_filter is strict (1) on eth1", "interfaces with addresses: eth0, eth1"]
    loose = {**state.settings, "net/ipv4/conf/all/rp_filter": "2"}
    assert findings(state._replace(settings=loose), None) == []


def test_samples_have_the_addresses_of_endpoints() -> None:
    local, remote = parse_address("10.1.1.9"), parse_address("10.1.2.3")
    services = SERVICES._replace(endpoints=(parse_address("192.0.2.1"), local, remote))
    state = CLEAN._replace(routes={
        parse_address("192.0.2.1"): "lo", local: "cni0", remote: "eth0"})
    assert {(sample.packet.source, sample.packet.destination) for sample in samples(state, services)} == {
        (local, remote), (remote, local)}


def test_without_services_a_sample_has_an_address_of_the_bridge() -> None:
    (outward, *_) = samples(CLEAN, None)
    assert outward.what == "from a pod (10.1.1.2, cni0) to another node (eth0)"
    assert outward.packet.destination is None


def test_the_uplink_of_a_node_that_is_a_container_is_no_pods() -> None:
    uplink = UPLINK._replace(kind="veth", leads_elsewhere=True)
    state = CLEAN._replace(**links(uplink))
    assert pod_links(state) == [BRIDGE]
    assert [sample.what for sample in samples(state, SERVICES)] == [
        sample.what for sample in samples(CLEAN, SERVICES)]


def test_a_node_without_a_way_out_has_no_samples() -> None:
    assert samples(CLEAN._replace(uplinks={}), None) == []


def test_pods_without_a_bridge_have_an_interface_each() -> None:
    pod = POD._replace(master=0)
    assert pod_links(CLEAN._replace(links=(UPLINK, pod))) == [pod]


def test_what_was_not_read_is_said() -> None:
    state = CLEAN._replace(problems=("cannot read x\n",), legacy_tables=("ip filter", "ip nat"))
    assert unclear(state, ()) == ["cannot read x\\n", "table ip filter of iptables-legacy is not read"]


def test_services_are_read_from_plans() -> None:
    plan = {"service_port": "shop/web", "family": "IPv4", "protocol": "TCP",
            "frontends": ["10.96.0.1:80/tcp", "node:30080/tcp"], "endpoints": ["10.1.2.3:80", "10.1.2.3:81"]}
    port = ServedPort(
        "shop/web", Family.IPV4, Protocol.TCP, [(VIP, 80), (None, 30080)],
        destinations("10.1.2.3:80 10.1.2.3:81"))
    assert Services.of("mode", [plan, plan], is_running=True) == Services(
        "mode", True, ((30080, "shop/web"),), (parse_address("10.1.2.3"),), (port, port))


def test_a_packet_stands_for_those_to_every_port_of_endpoints_or_to_every_frontend() -> None:
    port = ServedPort(
        "shop/web", Family.IPV4, Protocol.TCP, [(VIP, 80), (None, 30080)],
        destinations("10.1.2.3:80 10.1.2.4:80"))
    services = SERVICES._replace(ports=(port, port._replace(name="shop/none", endpoints=())))
    found = {sample.what: [(each.what, each.packet.dialled_port)
                           for each in narrowed(sample, CLEAN, services)]
             for sample in samples(CLEAN, services) if sample.hook or not sample.packet.is_translated}
    assert found == {
        "from a pod (10.1.1.2, cni0) to another node (10.1.2.3, eth0)": [
            ("from a pod (10.1.1.2, cni0) to another node (10.1.2.3, eth0), TCP port 80", 80)],
        "from another node (10.1.2.3, eth0) to a pod (10.1.1.2, cni0)": [
            ("from another node (10.1.2.3, eth0) to a pod (10.1.1.2, cni0), TCP port 80", 80)],
        "from a pod (cni0)": [
            ("from a pod (cni0) to 10.96.0.1:80/TCP of shop/web", 80),
            ("from a pod (cni0) to node:30080/TCP of shop/web", 30080)],
        "from this node": [
            ("from this node to 10.96.0.1:80/TCP of shop/web", 80),
            ("from this node to node:30080/TCP of shop/web", 30080)],
        "from outside": [("from outside to node:30080/TCP of shop/web", 30080)],
    }
    by_sockets = samples(CLEAN, services._replace(dials_endpoints=True))
    assert [sample.what for sample in by_sockets if sample.hook] == ["from outside"]
