"""The kernel objects of each kind of Service, as text for ipvsadm, ipset and iptables."""

from typing import Any

import pytest

from kproxy_conformance.builders import endpoint, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import Service
from kproxy_ipvs.render import render_text
from kproxy_ipvs.settings import Settings, read_settings

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", ip="192.0.2.1")
DEFAULTS = Settings()
LOCAL = endpoint("10.244.1.5", "node1")
REMOTE = endpoint("10.244.2.5", "node2")
LB: dict[str, Any] = {"external_ips": "198.51.100.1", "load_balancer_ips": "203.0.113.1"}
TO_LOCAL, TO_REMOTE = "-r 10.244.1.5:8080 -m -w 1", "-r 10.244.2.5:8080 -m -w 1"


def rendered(
    svc: Service, *endpoints: object, node: NodeView = NODE, settings: Settings = DEFAULTS
) -> list[str]:
    piece = endpoint_slice(str(svc.name), *endpoints)  # type: ignore[arg-type]
    return render_text(full_update(node, plans(node, svc, piece)), settings).splitlines()


def real_servers(lines: list[str], server: str) -> set[str]:
    prefix = f"-a {server} "
    return {line.removeprefix(prefix) for line in lines if line.startswith(prefix)}


def entries(lines: list[str], name: str) -> set[str]:
    prefix = f"add {name} "
    return {line.removeprefix(prefix) for line in lines if line.startswith(prefix)}


def short_circuit(lines: list[str]) -> set[str]:
    """Return the real servers of all virtual servers with a mark."""
    return {line.partition(" -r ")[2].partition(" ")[0] for line in lines if line.startswith("-a -f ")}


SERVERS = [
    ("ClusterIP", service(), (LOCAL, REMOTE), "-t 10.96.0.1:80", {TO_LOCAL, TO_REMOTE}),
    ("UDP", service("dns", "53/UDP"), (), "-u 10.96.0.1:53", set()),
    ("no endpoint", service(), (), "-t 10.96.0.1:80", set()),
    ("internal Local", service(internal_local=True), (LOCAL, REMOTE), "-t 10.96.0.1:80", {TO_LOCAL}),
    ("internal Local, none here", service(internal_local=True), (REMOTE,), "-t 10.96.0.1:80", set()),
    ("external IP", service(**LB), (LOCAL, REMOTE), "-t 198.51.100.1:80", {TO_LOCAL, TO_REMOTE}),
    ("external Local", service(external_local=True, **LB), (LOCAL, REMOTE), "-t 203.0.113.1:80", {TO_LOCAL}),
    ("external Local leaves the ClusterIP alone", service(external_local=True, **LB), (LOCAL, REMOTE),
     "-t 10.96.0.1:80", {TO_LOCAL, TO_REMOTE}),
    ("node port", service("web", "80@30080"), (REMOTE,), "-t 192.0.2.1:30080", {TO_REMOTE}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("svc", "endpoints", "server", "expected"), [row[1:] for row in SERVERS], ids=[row[0] for row in SERVERS]
)
def test_virtual_server(
    svc: Service, endpoints: tuple[object, ...], server: str, expected: set[str]
) -> None:
    lines = rendered(svc, *endpoints)
    assert any(line.startswith(f"-A {server} ") for line in lines)
    assert real_servers(lines, server) == expected


ENTRIES = [
    ("ClusterIP", service(), (LOCAL,), "KUBE-CLUSTER-IP", {"10.96.0.1,tcp:80"}),
    ("hairpin", service(), (LOCAL, REMOTE), "KUBE-LOOP-BACK", {"10.244.1.5,tcp:8080,10.244.1.5"}),
    ("on the device", service(**LB), (), "KUBE-IPVS-IPS", {"10.96.0.1", "198.51.100.1", "203.0.113.1"}),
    ("external IP", service(**LB), (), "KUBE-EXTERNAL-IP", {"198.51.100.1,tcp:80"}),
    ("external IP, Local", service(external_local=True, **LB), (), "KUBE-EXTERNAL-IP-LOCAL",
     {"198.51.100.1,tcp:80"}),
    ("load balancer IP, Local", service(external_local=True, **LB), (), "KUBE-LOAD-BALANCER-LOCAL",
     {"203.0.113.1,tcp:80"}),
    ("source ranges", service(source_ranges="198.19.0.0/16 198.18.0.1/32", **LB), (LOCAL,),
     "KUBE-LOAD-BALANCER-SOURCE-CIDR",
     {"203.0.113.1,tcp:80,198.19.0.0/16", "203.0.113.1,tcp:80,198.18.0.1"}),
    ("the node is in a source range", service(source_ranges="192.0.2.0/24", **LB), (LOCAL,),
     "KUBE-LOAD-BALANCER-SOURCE-IP", {"203.0.113.1,tcp:80,203.0.113.1"}),
    ("the node is in none", service(source_ranges="198.18.0.0/24", **LB), (LOCAL,),
     "KUBE-LOAD-BALANCER-SOURCE-IP", set()),
    ("node port", service("web", "80@30080"), (), "KUBE-NODE-PORT-TCP", {"30080"}),
    ("node port of SCTP", service("web", "80/SCTP@30080"), (), "KUBE-NODE-PORT-SCTP-HASH",
     {"192.0.2.1,sctp:30080"}),
    ("node port, Local", service("web", "80/UDP@30080", external_local=True), (), "KUBE-NODE-PORT-LOCAL-UDP",
     {"30080"}),
    ("health check", service(external_local=True, health_check_node_port=31000, **LB), (),
     "KUBE-HEALTH-CHECK-NODE-PORT", {"31000"}),
    ("Local without one here is dropped", service("web", "80@30080", external_local=True, **LB), (REMOTE,),
     "KUBE-NO-LOCAL-ENDPOINT", {"192.0.2.1,tcp:30080", "198.51.100.1,tcp:80", "203.0.113.1,tcp:80"}),
    ("internal Local without one here is dropped", service(internal_local=True), (REMOTE,),
     "KUBE-NO-LOCAL-ENDPOINT", {"10.96.0.1,tcp:80"}),
    ("nothing anywhere is refused, not dropped", service(internal_local=True), (),
     "KUBE-NO-LOCAL-ENDPOINT", set()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("svc", "endpoints", "name", "expected"), [row[1:] for row in ENTRIES], ids=[row[0] for row in ENTRIES]
)
def test_set_entries(svc: Service, endpoints: tuple[object, ...], name: str, expected: set[str]) -> None:
    assert entries(rendered(svc, *endpoints), name) == expected


def test_this_node_reaches_every_endpoint_of_a_local_frontend() -> None:
    lines = rendered(service("web", "80@30080", external_local=True, **LB), LOCAL, REMOTE)
    assert short_circuit(lines) == {"10.244.1.5:8080", "10.244.2.5:8080"}
    marked = entries(lines, "KUBE-SHORT-CIRCUIT")
    [mark] = {entry.partition(" skbmark ")[2] for entry in marked}
    assert f"-A -f {mark} -s rr" in lines
    assert {entry.partition(" ")[0] for entry in marked} == {
        "192.0.2.1,tcp:30080", "198.51.100.1,tcp:80", "203.0.113.1,tcp:80"
    }  # fmt: skip


@pytest.mark.parametrize("endpoints", [(), (LOCAL,)])
def test_no_short_circuit_without_other_endpoints(endpoints: tuple[object, ...]) -> None:
    assert not short_circuit(rendered(service(external_local=True, **LB), *endpoints))


def test_affinity_is_persistence() -> None:
    assert "-A -t 10.96.0.1:80 -s wlc -p 600" in rendered(service(affinity=600), settings=Settings("wlc"))


@pytest.mark.parametrize(("scheduler", "hashing"), [("rr", "sh"), ("dh", "sh"), ("sh", "sh"), ("mh", "mh")])
def test_affinity_of_the_short_circuit_is_source_hashing(scheduler: str, hashing: str) -> None:
    """IPVS translates no ports for persistent virtual servers with a mark."""
    of = service("web", affinity=600, external_local=True, **LB)
    lines = rendered(of, LOCAL, REMOTE, settings=Settings(scheduler))
    [server] = [line for line in lines if line.startswith("-A -f")]
    assert server.endswith(f" -s {hashing} -b {hashing}-fallback")
    assert any(line.startswith("-A -t 203.0.113.1:80") and "-p 600" in line for line in lines)


def test_hashing_schedulers_have_a_fallback() -> None:
    assert "-A -t 10.96.0.1:80 -s mh -b mh-fallback,mh-port" in rendered(service(), settings=Settings("mh"))
    assert "-A -t 10.96.0.1:80 -s sh -b sh-fallback" in rendered(service(), settings=Settings("sh"))


def test_ipv6_set_names_fit_the_kernel_limit() -> None:
    node = node_view("node1", family=Family.IPV6, node_port_addresses="2001:db8::1")
    lines = rendered(service(ip="fd00::1"), endpoint("fd00:1::5"), node=node)
    names = [line.split()[1] for line in lines if line.startswith("create ")]
    assert "KUBE-6-LOAD-BALANCER-SOURCE-CID" in names
    assert max(map(len, names)) <= 31
    assert real_servers(lines, "-t [fd00::1]:80") == {"-r [fd00:1::5]:8080 -m -w 1"}


def test_rules_do_not_depend_on_services() -> None:
    def rules(*services: Service) -> list[str]:
        update = full_update(NODE, {k: v for svc in services for k, v in plans(NODE, svc).items()})
        text = render_text(update, Settings())
        return text.partition("# iptables-restore")[2].partition("\n# ")[0].splitlines()

    many = [service(f"web-{n}", "80@" + str(30000 + n), ip=f"10.96.1.{n}", **LB) for n in range(100)]
    assert rules() == rules(*many)


def test_settings_of_the_ipvs_section() -> None:
    options = {"scheduler": "sh", "strictARP": True, "excludeCIDRs": ["192.0.2.0/24"], "tcpFinTimeout": 30.0}
    read = read_settings(BackendSettings((Family.IPV4,), options=options))
    assert read.scheduler == "sh"
    assert read.strict_arp
    assert [str(cidr) for cidr in read.exclude_cidrs] == ["192.0.2.0/24"]
    assert read.timeouts == (0, 30, 0)
