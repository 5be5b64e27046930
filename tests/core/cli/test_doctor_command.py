"""``kproxy doctor``: a network namespace for each hazard, and nothing found or changed in a clean one."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from kproxy_core.app.doctor import samples
from kproxy_core.app.drops import Drop, drops
from kproxy_core.cli.doctor import as_text, examine, status_of
from kproxy_core.linux.node_state import read_node_state
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.ruleset import ListedRuleset
from tests.core.cli.test_cli import WEB
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, running
from tests.nft_releases.releases import TRIXIE

OF_THE_MACHINE = ("clock", "cgroup", "kernel")
"""Checks of what no network namespace has of its own."""

FIREWALLD = """
table inet firewalld {
    chain filter_FORWARD {
        type filter hook forward priority filter + 10; policy accept;
        ct state { established, related } accept
        iifname "lo" accept
        ct state invalid drop
        jump filter_FORWARD_ZONES
        counter reject with icmpx admin-prohibited
    }
    chain filter_FORWARD_ZONES { iifname "trusted0" accept; }
}
"""
UFW = """
*filter
:FORWARD DROP [0:0]
:ufw-before-forward - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j ufw-before-forward
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -p icmp -m icmp --icmp-type 8 -j ACCEPT
-A ufw-before-forward -j ufw-user-forward
COMMIT
"""
DOCKER = """
*filter
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
:DOCKER-FORWARD - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER-FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -i docker0 -j ACCEPT
COMMIT
"""


@contextmanager
def clean() -> Iterator[Namespace]:
    """Yield a node with a pod at a bridge, where nothing hurts Services."""
    with namespace() as node, namespace() as pod:
        node.ip(
            "link add uplink type bridge", "address add 192.0.2.1/24 dev uplink", "link set uplink up",
            "route add default via 192.0.2.254",
            "link add cni0 type bridge", "address add 10.244.1.1/24 dev cni0", "link set cni0 up",
            f"link add veth1 type veth peer name eth0 netns {pod.name}", "link set veth1 master cni0",
            "link set veth1 up", "link set veth1 type bridge_slave hairpin on",
        )  # fmt: skip
        settings(node, "net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")
        yield node


def settings(node: Namespace, *given: str) -> None:
    node.run("sysctl", "-qw", *given)


def found(node: Namespace) -> dict[str, Any]:
    """Return the findings by check, without those of the machine, and what is unclear."""
    answer = node.inside(lambda: examine(None))
    assert answer["unclear"] == []
    return of_the_namespace(answer)


def of_the_namespace(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the findings in *answer* by check, without those of the machine."""
    findings = {finding["check"]: finding for finding in answer["findings"]}
    return {check: finding for check, finding in findings.items() if check not in OF_THE_MACHINE}


def state_of(node: Namespace) -> str:
    """Return the rules and the settings of *node*, without the number of tracked connections."""
    settings = node.run("sysctl", "-a", "-r", "^net").splitlines()
    kept = [line for line in settings if not line.startswith("net.netfilter.nf_conntrack_count")]
    return "\n".join((node.run("nft", "list", "ruleset"), node.run("iptables-save"), *kept))


def test_a_clean_node_has_no_findings_and_is_not_changed() -> None:
    with clean() as node:
        node.nft("table inet own { chain c { type filter hook forward priority 0; counter accept; }; }")
        before = state_of(node)
        assert found(node) == {}
        assert state_of(node) == before


def test_an_ill_node_is_not_changed_either() -> None:
    with clean() as node:
        node.nft(FIREWALLD)
        settings(node, "net.ipv4.ip_forward=0")
        before = state_of(node)
        assert {*found(node)} == {"firewall", "ip-forward"}
        assert state_of(node) == before


def by_iptables(rules: str) -> Callable[[Namespace], object]:
    return lambda node: node.run("iptables-nft-restore", stdin=rules)


def each(*actions: Callable[[Namespace], object]) -> Callable[[Namespace], object]:
    return lambda node: [action(node) for action in actions]


HAZARDS: dict[str, tuple[Callable[[Namespace], object], str, list[str]]] = {
    "firewalld": (
        lambda node: node.nft(FIREWALLD), "firewall",
        ["nft table inet firewalld, chain filter_FORWARD, rule 5 rejects them (0 packets so far)",
         "rule: counter packets 0 bytes 0 reject with icmpx admin-prohibited",
         "new connections from a pod (10.244.1.2, cni0) to another node (uplink), "
         "through Services and directly"]),
    "ufw": (
        by_iptables(UFW), "firewall",
        ["nft table ip filter, chain FORWARD, its policy drops them (0 packets so far)"]),
    "Docker": (
        by_iptables(DOCKER), "firewall",
        ["nft table ip filter, chain FORWARD, its policy drops them (0 packets so far)"]),
    "a hand-written ruleset": (
        lambda node: node.nft(
            "table ip mine { chain c { type filter hook forward priority 0; policy drop; "
            "ct state vmap { established : accept, related : accept, invalid : drop }; }; }"),
        "firewall", ["nft table ip mine, chain c, its policy drops them"]),
    "ip_forward": (
        lambda node: settings(node, "net.ipv4.ip_forward=0"), "ip-forward", ["net.ipv4.ip_forward = 0"]),
    "IPv6 forwarding": (
        each(lambda node: node.ip("address add 2001:db8::1/64 dev uplink"),
             lambda node: settings(
                 node, "net.ipv6.conf.all.forwarding=0", "net.bridge.bridge-nf-call-ip6tables=1")),
        "ip-forward", ["net.ipv6.conf.all.forwarding = 0"]),
    "rp_filter": (
        each(lambda node: node.ip("link add second type bridge", "address add 198.51.100.1/24 dev second",
                                  "link set second up"),
             lambda node: settings(node, "net.ipv4.conf.all.rp_filter=1")),
        "rp-filter",
        ["rp_filter is strict (1) on uplink, second", "interfaces with addresses: uplink, second"]),
    "hairpin": (
        lambda node: node.ip("link set veth1 type bridge_slave hairpin off"), "hairpin",
        ["hairpin is off at veth1"]),
    "bridge-nf-call-iptables": (
        lambda node: settings(node, "net.bridge.bridge-nf-call-iptables=0"), "bridge-nf-call",
        ["net.bridge.bridge-nf-call-iptables = 0", "pods at bridge cni0: 1"]),
    "MTU": (
        lambda node: node.ip("link set uplink mtu 1400"), "mtu",
        ["uplink has an MTU of 1400", "veth1 of a pod has one of 1500"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HAZARDS)
def test_each_hazard_is_found_with_evidence(name: str) -> None:
    make, check, evidence = HAZARDS[name]
    with clean() as node:
        make(node)
        findings = found(node)
    assert {*findings} == {check}
    finding = findings[check]
    assert finding["evidence"][: len(evidence)] == evidence
    assert finding["remedy"]
    assert name not in ("firewalld", "ufw", "Docker") or finding["what"].startswith(f"{name} ")


FIREWALLS = Path(__file__).with_name("firewalls")
"""Rules of Debian 12, as nft and iptables-save list them: firewalld 1.3.3 with both backends, ufw 0.36.2 and
docker.io 20.10.24, none of them configured further."""


def followed() -> list[Drop]:
    """Return where the doctor's packets end, or may end."""
    with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
        filters = ListedRuleset(sock)
        return [drop for sample in samples(read_node_state(), None) for drop in drops(
            filters, [(hook, sample.packet) for hook in ("prerouting", "forward", "postrouting")])]


@pytest.mark.parametrize(("program", "owner", "tables", "where", "ways"), [
    ("firewalld.nft", "firewalld", ["inet firewalld"], "chain filter_FWD_public, rule 8", "directly"),
    ("firewalld", "firewalld", ["ip filter", "ip6 filter"], "chain FWD_public, rule 8", "directly"),
    ("ufw", "ufw", ["ip filter", "ip6 filter"], "chain FORWARD, its policy", "through Services and directly"),
    ("docker", "Docker", ["ip filter"], "chain FORWARD, its policy", "through Services and directly"),
])  # fmt: skip
def test_firewalls_of_debian_are_understood(
    program: str, owner: str, tables: list[str], where: str, ways: str
) -> None:
    with clean() as node:
        node.ip("address add 2001:db8::1/64 dev uplink nodad", "route add default via 2001:db8::fe")
        settings(node, "net.ipv6.conf.all.forwarding=1", "net.bridge.bridge-nf-call-ip6tables=1")
        if program.endswith(".nft"):
            node.nft((FIREWALLS / program).read_text())
        for path in sorted(FIREWALLS.glob(f"{program}.ip*tables")):
            node.run(f"{path.suffix[1:]}-nft-restore", stdin=path.read_text())
        answer = node.inside(lambda: examine(None))
        ends = node.inside(followed)
    findings = [finding for finding in answer["findings"] if finding["check"] == "firewall"]
    assert {finding["what"].partition(" ")[0] for finding in findings} == {owner}
    assert sorted(re.sub("nft table (.*) (rejects|drops) .*", r"\1", finding["evidence"][0])
                  for finding in findings) == [f"{table}, {where}" for table in tables]
    assert all(line.endswith(f", {ways}") for finding in findings for line in finding["evidence"]
               if line.startswith("new connections"))
    assert [doubt for drop in ends for doubt in drop.doubts if doubt.startswith("match ")] == []


@pytest.mark.parametrize("accepting", [
    "-A DOCKER-USER -s 10.244.0.0/16 -j ACCEPT\n-A DOCKER-USER -d 10.244.0.0/16 -j ACCEPT\n",
    "-A DOCKER-USER -i cni0 -j ACCEPT\n-A DOCKER-USER -o cni0 -j ACCEPT\n",
])
def test_a_firewall_that_accepts_the_pods_is_no_hazard(accepting: str) -> None:
    with clean() as node:
        by_iptables(DOCKER.replace("COMMIT", f"{accepting}COMMIT"))(node)
        assert found(node) == {}


def test_a_rule_that_is_not_understood_makes_a_drop_unclear() -> None:
    with clean() as node:
        by_iptables(DOCKER.replace(
            "COMMIT", "-A DOCKER-USER -m statistic --mode random --probability 0.5 -j ACCEPT\nCOMMIT"))(node)
        answer = node.inside(lambda: examine(None))
    assert of_the_namespace(answer) == {}
    assert answer["unclear"] == [
        "nft table ip filter, chain FORWARD, its policy drops them unless an earlier rule accepts them "
        "(0 packets so far); not understood: match statistic in rule 1 of chain DOCKER-USER"]


def test_a_table_of_a_newer_nft_is_named() -> None:
    with clean() as node:
        done = node.inside(lambda: TRIXIE.run(
            "-f", "-", stdin="table inet theirs { set s { type ifname; }; }"))
        assert done.returncode == 0, done.stderr
        finding = found(node)["foreign-table"]
    assert "table inet theirs" in finding["evidence"][0]


def test_a_second_proxy_and_its_node_ports_are_found_beside_a_running_one(tmp_path: Path) -> None:
    (tmp_path / "web.yaml").write_text(WEB.replace(
        "clusterIP: 10.96.0.10, ports: [{port: 80}]",
        "type: NodePort, clusterIP: 10.96.0.10, ports: [{port: 80, nodePort: 30080}]"))
    with clean() as node, running(node, "--mode=nftables", f"--manifests={tmp_path}") as proxy:
        proxy.await_health()
        settings(node, "net.ipv4.ip_local_port_range=30000 60999")
        node.nft("table ip kube-proxy { }; table ip nat { chain KUBE-SERVICES { }; }")
        done = json.loads(node.inside(lambda: _doctor("-o", "json")))
    findings = of_the_namespace(done)
    assert done["proxy"] == "nftables"
    assert {*findings} == {"second-proxy", "node-ports"}
    assert findings["second-proxy"]["evidence"] == [
        "kproxy: a running proxy in mode nftables", "kube-proxy: nft table ip kube-proxy",
        "kube-proxy: chain KUBE-SERVICES in table ip nat"]
    assert findings["node-ports"]["evidence"] == [
        "net.ipv4.ip_local_port_range = 30000 60999", "node port 30080 of shop/web"]


def _doctor(*words: str) -> str:
    """Return what ``kproxy doctor`` prints with findings."""
    done = subprocess.run([KPROXY, "doctor", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_the_exit_status_and_the_text_say_whether_anything_was_found() -> None:
    with clean() as node:
        settings(node, "net.ipv4.ip_forward=0")
        assert node.inside(_doctor).splitlines()[:3] == [
            "ip-forward: this node forwards no IPv4 packets", "  net.ipv4.ip_forward = 0",
            "  remedy: sysctl -w net.ipv4.ip_forward=1, and the same in /etc/sysctl.d"]
    nothing: dict[str, Any] = {"proxy": "", "findings": [], "unclear": []}
    assert click.unstyle(as_text(nothing)).splitlines() == [
        "nothing was found on this node that hurts Services",
        "`kproxy explain` follows one packet, `kproxy trace` watches the next ones"]
    assert status_of(nothing) == 0


def test_names_of_other_programs_cannot_move_a_cursor() -> None:
    with clean() as node:
        node.ip("link set uplink down", "link set uplink name u\x1b[2Jp", "link set u\x1b[2Jp up",
                "route add default via 192.0.2.254",
                "link set u\x1b[2Jp mtu 1400")
        shown = node.inside(_doctor)
    assert "\x1b" not in shown
    assert "u\\x1b[2Jp has an MTU of 1400" in shown
