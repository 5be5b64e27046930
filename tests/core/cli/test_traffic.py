"""The connections that ``kproxy verify --traffic`` opens, and what it concludes from them."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy_conformance.builders import destinations
from kproxy_core.app.verify import ANSWERED, HUNG, REFUSED, Attempt, connections, is_settled, result
from kproxy_core.model.address import parse_address
from tests.core.bpf_places import confined, inside
from tests.core.cli.sides import FLAGS, VIP, sides, write
from tests.core.cli.sides import NODE as NODE_ADDRESS
from tests.core.cli.test_cli import WEB, manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, running

__all__ = ["manifests", "node"]

ONE, TWO, OTHER = destinations("10.1.1.1:8080 10.1.2.1:8080 10.1.3.1:8080")
NODE = parse_address("192.0.2.10")


def target(
    outcome: str = "forwarded", *endpoints: str, sticky: bool = False, rarest: float = 0,
    translated: bool = False,
) -> dict[str, Any]:
    return {"frontend": "10.96.0.10:80", "service_port": "shop/web", "outcome": outcome,
            "because": "a reason", "endpoints": list(endpoints), "sticky": sticky, "translated": translated,
            "rarest": rarest or 1 / max(len(endpoints), 1), "ready": len(endpoints)}  # fmt: skip


ONE_ENDPOINT = target("forwarded", "10.1.1.1:8080", translated=True)
TWO_ENDPOINTS = target("forwarded", "10.1.1.1:8080", "10.1.2.1:8080")


@pytest.mark.parametrize(("asked", "attempts", "problems"), [
    (TWO_ENDPOINTS, [(ANSWERED, ONE), (ANSWERED, TWO)], []),
    (TWO_ENDPOINTS, [(ANSWERED, ONE), (REFUSED, TWO), (REFUSED, TWO)],
     ["endpoint 10.1.2.1:8080: 2 of 2 connections refused"]),
    (TWO_ENDPOINTS, [(ANSWERED, ONE), (HUNG, None)], ["endpoint not known: 1 of 1 connections hung"]),
    (TWO_ENDPOINTS, [(HUNG, ONE), (REFUSED, TWO)],
     ["no connection of 2 was answered (hung, refused); ready endpoints: 2"]),
    (TWO_ENDPOINTS, [(ANSWERED, OTHER)], ["connections reach 10.1.3.1:8080, which may not be chosen"]),
    (TWO_ENDPOINTS, [(ANSWERED, destinations("127.0.0.1:40000")[0])], []),
    (ONE_ENDPOINT, [(ANSWERED, destinations("127.0.0.1:40000")[0])],
     ["connections reach 127.0.0.1:40000, which may not be chosen"]),
    (ONE_ENDPOINT, [(ANSWERED, destinations("10.96.0.10:80")[0])],
     ["no rule translates connections: 10.96.0.10:80 itself answers"]),
    (target("refused"), [(REFUSED, None)], []),
    (target("dropped"), [(HUNG, None)], []),
    (target("refused"), [(ANSWERED, ONE)], ["connections are answered, and should be refused: a reason"]),
], ids=str)  # fmt: skip
def test_results_that_contradict_the_plan_are_problems(
    asked: dict[str, Any], attempts: list[tuple[str, Any]], problems: list[str]
) -> None:
    tried = [Attempt(outcome, endpoint, NODE) for outcome, endpoint in attempts]
    assert result(asked, tried)["problems"] == problems


@pytest.mark.parametrize(("asked", "attempt", "verdict"), [
    (ONE_ENDPOINT, (ANSWERED, ONE), "ok"),
    (ONE_ENDPOINT, (ANSWERED, None), "answered, by whom is not known"),
    (ONE_ENDPOINT, (HUNG, None), "problem"),
    (TWO_ENDPOINTS, (ANSWERED, None), "ok"),
    (target("refused", translated=True), (REFUSED, None), "ok"),
], ids=str)  # fmt: skip
def test_a_verdict_is_certain_only_if_the_endpoint_is_known(
    asked: dict[str, Any], attempt: tuple[str, Any], verdict: str
) -> None:
    assert result(asked, [Attempt(*attempt, NODE)])["verdict"] == verdict


def test_connections_are_tried_until_each_endpoint_is_reached() -> None:
    assert connections(TWO_ENDPOINTS, 50) == 16
    assert connections(TWO_ENDPOINTS, 5) == 5
    assert connections(target("refused"), 20) == 1
    assert connections(target("forwarded", "10.1.1.1:8080", "10.1.2.1:8080", sticky=True), 20) == 1
    light = target("forwarded", "10.1.1.1:8080", "10.1.2.1:8080", rarest=0.1)
    assert connections(light, 100) == 77
    first = [Attempt(ANSWERED, ONE, NODE)]
    assert not is_settled(TWO_ENDPOINTS, first)
    assert is_settled(TWO_ENDPOINTS, [*first, Attempt(HUNG, TWO, NODE)])


SERVER = """
import socket, sys
found = [socket.create_server((address, 8080)) for address in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def serving(node: Namespace, *addresses: str) -> Iterator[None]:
    """Servers at *addresses* of the node, where all traffic has somewhere to go."""
    node.run("ip", "link", "set", "lo", "up")
    node.run("ip", "route", "add", "default", "dev", "lo")
    for address in ("10.1.2.3", "10.1.2.4", "192.0.2.10"):
        node.run("ip", "address", "add", f"{address}/32", "dev", "lo")
    command = ["ip", "netns", "exec", node.name, sys.executable, "-c", SERVER, *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield
        assert server.stdin is not None
        server.stdin.close()


def verify(node: Namespace, *options: str, cgroup: Path | None = None) -> tuple[int, str]:
    command = ["ip", "netns", "exec", node.name, KPROXY, "verify", "--traffic", "--rate=200", *options]
    if cgroup is not None:
        command = inside(cgroup, command)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout or done.stderr


MODES = ["nftables", "iptables", "ebpf"]


@pytest.mark.parametrize("mode", MODES)
def test_the_endpoints_of_real_connections_are_distinguished(
    node: Namespace, manifests: Path, tmp_path: Path, mode: str
) -> None:
    web = WEB.replace("[10.1.2.3]}", "[10.1.2.3]}, {addresses: [10.1.2.4]}")
    (manifests / "web.yaml").write_text(web)
    none = WEB.replace("web", "none").replace("10.96.0.10", "10.96.0.11").replace(
        "[{addresses: [10.1.2.3]}]", "[]")
    (manifests / "none.yaml").write_text(none)
    flags = (f"--mode={mode}", f"--manifests={manifests}")
    with confined(tmp_path) as (cgroup, confining), serving(node, "10.1.2.3"):
        with running(node, *flags, confining) as proxy:
            proxy.await_health()
            for _ in range(4):  # 16 connections miss one of two endpoints once in 30,000 runs.
                status, text = verify(node, "-o", "json", cgroup=cgroup)
                found = {frontend["service_port"]: frontend for frontend in json.loads(text)["frontends"]}
                if len(found["shop/web"]["reached"]) == 2:
                    break
            assert set(found["shop/web"]["reached"][0]) == {"endpoint", "answered"}
            assert set(found["shop/web"]["reached"][1]) == {"endpoint", "refused"}
            assert "endpoint 10.1.2.4:8080" in found["shop/web"]["problems"][0]
            assert found["shop/none"]["problems"] == []
            assert status == 1
            assert verify(node, "shop/none:80", cgroup=cgroup)[0] == 0
            status, text = verify(node, "shop/wbe", cgroup=cgroup)
            assert (status, "near names: shop/web" in text) == (1, True)


def test_what_other_programs_do_is_not_taken_for_the_plan(tmp_path: Path) -> None:
    write(tmp_path)
    with sides() as made, running(
            made.node, "--mode=nftables", f"--manifests={tmp_path}", *FLAGS) as proxy:
        proxy.await_health()

        def frontends() -> dict[str, Any]:
            found = json.loads(verify(made.node, "web:http", "-o", "json")[1])
            assert found["tried"]["not_from"] == ["pod", "outside"]
            return {frontend["frontend"]: frontend for frontend in found["frontends"]}

        def said() -> list[str]:
            return [found["verdict"] for at, found in frontends().items() if at in (vip, vip6)]

        vip, vip6 = f"{VIP['ip']}:80", f"[{VIP['ip6']}]:80"
        assert said() == ["ok", "ok"]
        made.node.run("sysctl", "-qw", "net.ipv4.ip_forward=0")
        assert said() == ["ok", "ok"], "the node's own packets are not forwarded"
        text = verify(made.node, "web:http")[1]
        assert "do what the plans say, from this node (nftables)" in text
        assert "packets of pods and from outside pass other rules and the node's forwarding" in text
        made.node.ip(f"address add {VIP['ip']}/32 dev lo")
        with made.node.inside(lambda: socket.create_server((VIP["ip"], 80))):
            made.node.nft(
                "table ip raw { chain o { type filter hook output priority raw; tcp dport 80 notrack; }; }")
            assert said() == ["answered, by whom is not known", "ok"]
        made.node.nft("delete table ip raw")
        made.node.ip(f"address delete {VIP['ip']}/32 dev lo")
        with made.node.inside(lambda: socket.create_server((NODE_ADDRESS["ip"], 7000))):
            made.node.nft(
                "table ip theirs { chain o { type nat hook output priority -110; "
                f"ip daddr {VIP['ip']} tcp dport 80 dnat to {NODE_ADDRESS['ip']}:7000; }}; }}")
            assert frontends()[vip]["problems"] == [
                f"connections reach {NODE_ADDRESS['ip']}:7000, which may not be chosen"]


def test_a_dry_run_opens_nothing(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        assert verify(node, "--dry-run") == (0, (
            "10.96.0.10:80/TCP of shop/web: up to 1 connections, should be forwarded\n"
            "up to 1 connections in 0 s\n"))  # fmt: skip


def test_without_a_proxy_and_objects_nothing_can_be_verified(node: Namespace) -> None:
    status, text = verify(node)
    assert status == 1
    assert "no kproxy runs in this network namespace" in text
