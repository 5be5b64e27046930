"""``kproxy explain --probe`` sends packets where it was asked to, and says what the rules cannot tell."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.core.bpf_places import confined, inside
from tests.core.cli.sides import ENDPOINT, FLAGS, UDP_PORT, VIP, Sides, answering, sides, write
from tests.core.namespaces import namespace
from tests.core.processes import KPROXY, running
from tests.patience import PATIENCE

MODES = ["nftables", "iptables", "userspace", "ebpf"]
POD = {"ip": "10.244.1.2", "ip6": "fd00:244:1::2"}
"""Behind the bridge."""
FAMILIES = tuple(VIP)
NO_LISTENER = "no process of the pod listens at that port, or a filter rejects them; compare the targetPort"
Json = dict[str, Any]


class Probed:
    def __init__(self, made: Sides, cgroup: Path) -> None:
        self.made, self.cgroup = made, cgroup

    def explain(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = ["ip", "netns", "exec", self.made.node.name, KPROXY, "explain", *words]
        return subprocess.run(inside(self.cgroup, command), capture_output=True, text=True, check=False)

    def probe(self, sender: str, to: str) -> tuple[int, dict[str, Json]]:
        """Return the exit status, and the probes by frontend."""
        done = self.explain(sender, to, "--probe", "-o", "json")
        assert done.stdout, done.stderr
        packets = json.loads(done.stdout)["packets"]
        return done.returncode, {
            f"{packet['to']}/{packet['protocol']}": packet["probe"] for packet in packets}

    def await_endpoint(self, *texts: str) -> None:
        """Wait until all frontends have an endpoint with one of *texts*, and the kernel agrees."""
        ends = time.monotonic() + PATIENCE
        while True:
            packets = json.loads(self.explain("node", "web", "-o", "json").stdout)["packets"]
            if all(packet["kernel"]["verdict"] != "differs" and any(
                    text in each["endpoint"] for each in packet["endpoints"] for text in texts)
                    for packet in packets):
                return
            assert time.monotonic() < ends, packets


@contextmanager
def serving(directory: Path, mode: str, **given: object) -> Iterator[Probed]:
    manifests = directory / "manifests"
    manifests.mkdir()
    write(manifests, **given)
    with confined(directory) as (cgroup, confining), sides() as made, running(
            made.node, f"--mode={mode}", f"--manifests={manifests}", *FLAGS, confining) as proxy:
        proxy.await_health()
        yield Probed(made, cgroup)


def at(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


SENDERS = ("node", *POD.values())


@pytest.mark.parametrize("mode", MODES)
def test_endpoints_that_answer_refuse_and_are_silent_are_told_apart(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path, mode) as probed:
        for sender in SENDERS:
            status, found = probed.probe(sender, "web")
            assert (status, len(found)) == (0, 8 if sender == "node" else 4)
            for to, probe in found.items():
                endpoint = at(ENDPOINT[family_of(to)], 8080)
                assert (probe["findings"], probe["unclear"]) == ([], []), (sender, to)
                assert probe["directly"] == [{"endpoint": endpoint, "result": "answered"}]
                through = "" if probe["relayed"] else endpoint
                assert probe["through"] == [{"endpoint": through, "answered": 1}]
                assert probe["relayed"] == (mode == "userspace")
                assert sender in ("node", probe["source"])

        write(tmp_path / "manifests", target=8081)
        probed.await_endpoint(":8081")
        for sender in SENDERS[:2]:
            status, found = probed.probe(sender, "web")
            assert status == 1
            for to, probe in found.items():
                endpoint = at(ENDPOINT[family_of(to)], 8081)
                what = "connections" if to.endswith("TCP") else "datagrams (ICMP port unreachable)"
                assert probe["directly"] == [{"endpoint": endpoint, "result": "refused"}]
                assert probe["findings"][0].startswith(f"{endpoint} refuses {what}: {NO_LISTENER}")

        probed.made.endpoint.nft(
            "table inet silent { chain i { type filter hook input priority 0; "
            "meta l4proto { tcp, udp } th dport 8081 drop; }; }")
        for sender in SENDERS[:2]:
            status, found = probed.probe(sender, "web")
            assert status == 1
            for to, probe in found.items():
                endpoint = at(ENDPOINT[family_of(to)], 8081)
                assert probe["directly"] == [{"endpoint": endpoint, "result": "hung"}]
                if to.endswith("TCP"):
                    assert probe["findings"][0].startswith(
                        f"{endpoint} does not answer: its pod or node is gone")
                else:
                    assert (probe["findings"], probe["unclear"]) == ([], [
                        f"no answer from {endpoint} to an empty datagram, which proves nothing: UDP servers "
                        "need not answer, and nothing refused it"])


def family_of(to: str) -> str:
    return "ip6" if to.startswith("[") else "ip"


BEHIND = {"ip": "10.244.1.3", "ip6": "fd00:244:1::3"}
"""Another pod behind the same bridge."""


def test_answers_that_take_another_way_are_found_from_the_pod(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as probed, namespace() as behind:
        node, manifests = probed.made.node, tmp_path / "manifests"
        node.ip(f"link add port2 type veth peer name eth0 netns {behind.name}", "link set port2 master cni0",
                "link set port2 up")
        behind.ip("address add 10.244.1.3/24 dev eth0", "address add fd00:244:1::3/64 dev eth0 nodad",
                  "link set eth0 up", "route add default via 10.244.1.1",
                  "route add default via fd00:244:1::1")
        web = (manifests / "web.yaml").read_text()
        for family, address in ENDPOINT.items():
            web = web.replace(f'["{address}"]', f'["{BEHIND[family]}"]')
        (manifests / "web.yaml").write_text(web)
        probed.await_endpoint(*BEHIND.values())
        with answering(behind):
            assert [probed.probe(sender, "web:http")[0] for sender in SENDERS] == [0, 0, 0]
            node.run("sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=0",
                     "net.bridge.bridge-nf-call-ip6tables=0")
            assert probed.probe("node", "web:http")[0] == 0
            for family, pod in POD.items():
                status, found = probed.probe(pod, "web:http")
                vip, endpoint = at(VIP[family], 80), at(BEHIND[family], 8080)
                assert status == 1
                assert found[f"{vip}/TCP"]["findings"] == [
                    f"{endpoint} answers directly, but 1 of 1 connections to it through {vip} get no answer: "
                    "its answers do not come back through this node, as over a bridge whose packets skip "
                    "netfilter or by another route, or they are dropped on the way"]


def test_rules_that_stop_packets_to_the_frontend_alone_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as probed:
        probed.made.node.nft(
            "table inet theirs { chain p { type filter hook prerouting priority -150; tcp dport 80 drop; }; "
            "chain f { type filter hook forward priority 0; "
            f"ct original ip daddr {VIP['ip']} udp dport 8080 reject; }}; }}")
        status, found = probed.probe(POD["ip"], "web")
        vip = VIP["ip"]
        assert status == 1
        assert found[f"{vip}:80/TCP"]["findings"] == [
            f"endpoints answer directly, but 1 of 1 connections through {vip}:80 get no answer: they opened "
            "no connection on this node: a rule drops them, or none translates them"]
        assert found[f"{vip}:{UDP_PORT}/UDP"]["findings"] == [
            f"endpoints answer directly, but 1 of 1 datagrams through {vip}:{UDP_PORT} are refused: they "
            "opened no connection on this node: a rule drops them, or none translates them"]
        text = probed.explain(POD["ip"], f"{vip}:80", "--probe").stdout
        assert f"  probe       1 connection from {POD['ip']}, in the network of its pod\n" in text
        assert f"              through {vip}:80  not known by whom: hung 1\n" in text
        assert "              directly  10.244.3.2:8080: answers\n" in text


def test_what_should_not_be_answered_is_well_if_it_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as probed:
        web = tmp_path / "manifests" / "web.yaml"
        web.write_text(web.read_text().replace("ready: true", "ready: false"))
        ends = time.monotonic() + PATIENCE
        while "refused" not in (text := probed.explain("node", "web:http").stdout):
            assert time.monotonic() < ends, text
        status, found = probed.probe("node", "web:http")
        assert (status, {probe["through"][0].get("refused") for probe in found.values()}) == (0, {1})
        assert not any(probe["directly"] for probe in found.values())


def test_only_the_sender_that_was_asked_for_sends(tmp_path: Path) -> None:
    with serving(tmp_path, "nftables") as probed:
        for words, problem in (
                (("pod", "web"), "give the address of a pod on this node in place of 'pod'"),
                (("outside", "web"), "give node in place of 'outside'"),
                (("web", "--report=/none"), "it cannot be used with --report")):
            done = probed.explain(*words, "--probe")
            assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
        done = probed.explain("10.244.9.9", "web", "--probe")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no pod with the address 10.244.9.9 can be entered here" in done.stderr
        packets = json.loads(probed.explain("web:http", "--probe", "-o", "json").stdout)["packets"]
        assert {packet["origin"] for packet in packets if packet["probe"]} == {"node"}
        assert {packet["origin"] for packet in packets} == {"pod", "node", "outside"}
        before = flows(probed)
        probed.explain("node", "web")
        assert flows(probed) == before


def flows(probed: Probed) -> int:
    """Return the number of connections that connection tracking has seen begin."""
    found = probed.made.node.run("conntrack", "-L")
    return sum("dport=80 " in line or "dport=8080 " in line for line in found.splitlines())
