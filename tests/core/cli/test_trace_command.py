"""``kproxy trace`` beside a running proxy: what it prints, and that nothing is left of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.core.bpf_places import confined, inside
from tests.core.cli.test_cli import WEB, manifests, node
from tests.core.cli.test_traffic import serving
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, running

__all__ = ["manifests", "node"]

DIAL = """
import socket, sys
dialling = socket.socket()
dialling.settimeout(1)
dialling.connect_ex((sys.argv[1], int(sys.argv[2])))
"""
DIAL_AND_WAIT = f"{DIAL}sys.stdin.read()"
TABLE = "kproxy-trace-"
"""The names of tables that mark packets begin with this."""


@contextmanager
def traced(
    node: Namespace, *words: str, tables: int = 1, seconds: int = 20
) -> Iterator["subprocess.Popen[str]"]:
    """A trace, once the rules of *tables* traces are in the kernel."""
    command = ["ip", "netns", "exec", node.name, KPROXY, "trace", *words, "-o", "json",
               f"--seconds={seconds}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            while node.run("nft", "list", "tables").count(TABLE) < tables:
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def packets(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    assert process.stdout is not None
    return [json.loads(line) for line in process.stdout]


def dial(node: Namespace, host: str, port: int) -> None:
    node.run(sys.executable, "-c", DIAL, host, str(port))


@pytest.mark.parametrize(("mode", "refusal"), [("nftables", "reject with tcp reset"), ("iptables", "reject")])
def test_rules_endpoint_and_refusal_of_each_packet_are_printed(
    node: Namespace, manifests: Path, mode: str, refusal: str
) -> None:
    none = WEB.replace("web", "none").replace("10.96.0.10", "10.96.0.11")
    (manifests / "none.yaml").write_text(none.replace("[{addresses: [10.1.2.3]}]", "[]"))
    flags = (f"--mode={mode}", f"--manifests={manifests}")
    with serving(node, "10.1.2.3"), running(node, *flags) as proxy:
        proxy.await_health()
        with traced(node, "shop/web", "--count=1") as trace:
            dial(node, "10.96.0.10", 80)
            (packet,) = packets(trace)
        assert (packet["outcome"], packet["endpoint"]) == ("forwarded", "10.1.2.3:8080")
        assert packet["answered_ms"] is not None
        assert packet["service_port"] == "shop/web"
        assert any("dnat" in rule["text"] for rule in packet["rules"])
        with traced(node, "10.96.0.11:80", "--count=1") as trace:
            dial(node, "10.96.0.11", 80)
            (packet,) = packets(trace)
        assert packet["outcome"] == "refused"
        assert packet["because"].endswith(refusal)
        assert TABLE not in node.run("nft", "list", "tables")


def test_sockets_that_programs_translate_tell_the_frontend_that_they_dialled(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    (manifests / "twin.yaml").write_text(WEB.replace("web", "twin").replace("10.96.0.10", "10.96.0.11"))
    with confined(tmp_path) as (cgroup, confining), serving(node, "10.1.2.3"):
        with running(node, "--mode=ebpf", f"--manifests={manifests}", confining) as proxy:
            proxy.await_health()
            with traced(node, "shop/web", "--count=1") as trace, ExitStack() as clients:
                python = ["ip", "netns", "exec", node.name, sys.executable, "-c", DIAL_AND_WAIT]
                for address in ("10.96.0.11", "10.96.0.10"):
                    clients.enter_context(subprocess.Popen(
                        inside(cgroup, [*python, address, "80"]), stdin=subprocess.PIPE))
                (packet,) = packets(trace)
            assert (packet["outcome"], packet["endpoint"]) == ("forwarded", "10.1.2.3:8080")
            assert (packet["to"], packet["service_port"]) == ("10.96.0.10:80", "shop/web")
            assert packet["because"] == "chosen when the socket connected"
            node.nft("table ip evil { chain c { type filter hook output priority raw; "
                     "tcp dport 8080 drop; }; }")
            with traced(node, "shop/web", "--count=1") as trace, ExitStack() as clients:
                clients.enter_context(subprocess.Popen(
                    inside(cgroup, [*python, "10.96.0.10", "80"]), stdin=subprocess.PIPE))
                (packet,) = packets(trace)
            assert (packet["outcome"], packet["to"]) == ("dropped", "10.96.0.10:80")
            assert packet["because"] == "ip evil c: tcp dport 8080 drop, before any rule of Services"


@pytest.mark.parametrize("by_flags", [False, True], ids=["of the proxy", "of manifests"])
def test_only_packets_of_the_senders_that_are_asked_for_are_shown(
    node: Namespace, manifests: Path, by_flags: bool
) -> None:
    flags = ("--mode=nftables", f"--manifests={manifests}")
    with serving(node, "10.1.2.3"), running(node, *flags) as proxy:
        proxy.await_health()
        words = ("web:80", *flags * by_flags)
        with (traced(node, "node", *words, "--count=1") as own,
              traced(node, "outside", *words, tables=2, seconds=2) as others):
            dial(node, "10.96.0.10", 80)
            (packet,) = packets(own)
            assert packet["endpoint"] == "10.1.2.3:8080"
            assert packets(others) == []
            assert others.wait() == 1


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_killed_trace_leaves_nothing_and_the_proxy_notices_no_change(
    node: Namespace, manifests: Path, mode: str
) -> None:
    with running(node, f"--mode={mode}", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        tables = node.run("nft", "list", "tables")
        with traced(node, "shop/web"), traced(node, "shop/web", tables=2):
            assert "does what the plans say" in node.run(KPROXY, "diff")
        assert node.run("nft", "list", "tables") == tables
        _, log = proxy.end()
        assert "changed" not in log, log


def test_a_trace_without_packets_ends_with_status_1(node: Namespace, manifests: Path) -> None:
    def complaint(*words: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", node.name, KPROXY, "trace", *words, "--seconds=0.2"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        return done.stderr

    flags = ("--mode=nftables", f"--manifests={manifests}")
    with running(node, *flags) as proxy:
        proxy.await_health()
        assert "no packet to shop/web was seen in 0.2 s" in complaint("shop/web")
        assert "near names: shop/web" in complaint("shop/wbe")
        assert "no packet to web:80 was seen" in complaint("outside", "web:80")
    assert "no kproxy runs in this network namespace" in complaint("shop/web")
    assert "no packet to shop/web was seen" in complaint("shop/web", *flags)
