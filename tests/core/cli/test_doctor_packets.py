"""``kproxy doctor`` beside a proxy: rules of other programs that stop packets to Services."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.bpf_places import confined
from tests.core.cli.sides import ENDPOINT, FLAGS, NODE, NODE_PORT, SENDERS, VIP, Sides, sides, write
from tests.core.processes import kproxy, running

MACHINE = ("clock", "cgroup", "kernel")

PORTMAP = f"""
*nat
:CNI-HOSTPORT-DNAT - [0:0]
-I PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-I OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp --dport {NODE_PORT} -j DNAT --to-destination 10.244.1.2:7777
COMMIT
"""


def chain(hook: str, priority: str, rule: str, kind: str = "filter") -> str:
    return (f"table inet theirs {{ set met {{ type ipv4_addr; flags dynamic; timeout 1m; }}; "
            f"chain c {{ type {kind} hook {hook} priority {priority}; {rule}; }}; }}")


TO_VIP = f"{VIP['ip']}:80/TCP of shop/web:http"
TO_NODE_PORT = f"node:{NODE_PORT}/TCP of shop/web:http"
CAUSES: dict[str, tuple[str, str, set[str]]] = {
    "another program's translation": (
        chain("prerouting", "-110", f"ip daddr {VIP['ip']} tcp dport 80 dnat ip to 192.0.2.2:9999", "nat"),
        "translation", {f"from a pod (cni0) to {TO_VIP}"}),
    "of the node's packets": (
        chain("output", "-110", f"ip daddr {VIP['ip']} tcp dport 80 dnat ip to 192.0.2.2:9999", "nat"),
        "translation", {f"from this node to {TO_VIP}"}),
    "a hostPort": (
        PORTMAP, "translation",
        {f"from {sender} to {TO_NODE_PORT}" for sender in ("a pod (cni0)", "this node", "outside")}),
    "hook raw": (
        chain("prerouting", "raw", f"ip daddr {VIP['ip']} tcp dport 80 drop"),
        "firewall", {f"from a pod (cni0) to {TO_VIP}"}),
    "all of hook raw": (
        chain("prerouting", "raw", f"iifname uplink ip daddr {NODE['ip']} meta l4proto tcp drop"),
        "firewall", {f"from outside to {TO_NODE_PORT}"}),
    "local destinations": (
        chain("prerouting", "mangle", f"fib daddr type local ip version 4 tcp dport {NODE_PORT} drop"),
        "firewall", {f"from {sender} to {TO_NODE_PORT}" for sender in ("a pod (cni0)", "outside")}),
    "the endpoints' port": (
        chain("forward", "0", "ip version 4 tcp dport 8080 drop"), "firewall", {
            "from a pod (10.244.3.2, pod3) to another node (uplink), TCP port 8080, "
            "through Services and directly",
            "from another node (uplink) to a pod (10.244.3.2, pod3), TCP port 8080, "
            "through Services and directly"}),
}  # fmt: skip
HARMLESS = {
    "another port": chain("forward", "0", "tcp dport 8081 drop"),
    "another address": chain("prerouting", "raw", "ip daddr 10.96.0.11 tcp dport 80 drop"),
    "a translation to the endpoint": chain(
        "prerouting", "-110", f"ip daddr {VIP['ip']} tcp dport 80 dnat ip to {ENDPOINT['ip']}:8080", "nat"),
    "a limit": chain("forward", "0", "ct state new add @met { ip saddr limit rate over 9000/second } drop"),
}


def examined(made: Sides) -> tuple[dict[str, Any], list[str]]:
    """Return the findings by check, and what is unclear."""
    answer = json.loads(kproxy("doctor", "-o", "json", node=made.node).stdout)
    found = {each["check"]: each for each in answer["findings"] if each["check"] not in MACHINE}
    return found, answer["unclear"]


def reached(made: Sides) -> set[tuple[str, str]]:
    """Return the senders that Service shop/web answers, each with what it dialled."""
    return {(sender, host) for sender in SENDERS for host, port in ((VIP["ip"], 80), (NODE["ip"], NODE_PORT))
            if made.dial(sender, "ip", port, host=host) == "answered"}


@pytest.mark.parametrize("mode", ["userspace", "ebpf"])
def test_rules_of_a_mode_s_own_are_no_other_program_s(tmp_path: Path, mode: str) -> None:
    (tmp_path / "manifests").mkdir()
    write(tmp_path / "manifests")
    flags = (f"--mode={mode}", f"--manifests={tmp_path / 'manifests'}", *FLAGS)
    with sides() as made, confined(tmp_path) as (_, confining), running(
            made.node, *flags, *[confining] * (mode == "ebpf")) as proxy:
        proxy.await_health()
        assert examined(made) == ({}, [])
        made.node.nft(chain("prerouting", "raw", f"ip version 4 tcp dport {NODE_PORT} drop"))
        found, _ = examined(made)
        assert f"new connections from outside to {TO_NODE_PORT}" in found["firewall"]["evidence"]
        assert ("outside", NODE["ip"]) not in reached(made)


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_rules_in_the_way_of_services_are_found(tmp_path: Path, mode: str) -> None:
    write(tmp_path)
    with sides() as made, running(made.node, f"--mode={mode}", f"--manifests={tmp_path}", *FLAGS) as proxy:
        proxy.await_health()
        everyone = reached(made)
        assert len(everyone) == 2 * len(SENDERS)
        assert examined(made) == ({}, [])
        for name, (rules, check, ways) in CAUSES.items():
            if rules is PORTMAP:
                made.node.run("iptables-nft-restore", "-n", stdin=rules)
            else:
                made.node.nft(rules)
            found, _ = examined(made)
            assert {*found} == {check}, name
            shown = found[check]["evidence"]
            assert {line.removeprefix("new connections ") for line in shown
                    if line.startswith("new connections ")} == ways, name
            assert reached(made) < everyone, name
            status = json.loads(kproxy("status", "-o", "json", node=made.node).stdout)
            assert [each.partition(":")[0] for each in status["problems"]] == [check]
            if rules is PORTMAP:
                for where in ("PREROUTING", "OUTPUT"):
                    made.node.run("iptables-nft", "-t", "nat", "-D", where, "-m", "addrtype", "--dst-type",
                                  "LOCAL", "-j", "CNI-HOSTPORT-DNAT")
            else:
                made.node.nft("delete table inet theirs")
        for name, rules in HARMLESS.items():
            made.node.nft(rules)
            assert examined(made) == ({}, []), name
            assert reached(made) == everyone, name
            made.node.nft("delete table inet theirs")
        made.node.nft("table netdev theirs { chain c { type filter hook ingress device uplink priority 0; "
                      "tcp dport 1 drop; }; }")
        assert examined(made) == ({}, [
            "nft table netdev theirs, chain c at hook ingress is not followed; "
            "`kproxy trace` sees what it drops"])
