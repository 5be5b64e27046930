"""``kproxy explain`` as an operator uses it, beside a running proxy and without one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.cli.test_cli import manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, running

__all__ = ["manifests", "node"]

SHOP = Path(__file__).parents[3] / "examples" / "shop"


def kernel_of(output: str) -> dict[str, Any]:
    (packet,) = json.loads(output)["packets"]
    found: dict[str, Any] = packet["kernel"]
    return found


def test_the_running_proxy_explains_with_the_rules_that_the_kernel_holds(
    node: Namespace, manifests: Path
) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        question = (KPROXY, "explain", "10.1.9.9", "10.96.0.10:80", "-o", "json")
        kernel = kernel_of(node.run(*question))
        assert (kernel["verdict"], kernel["mode"], kernel["live"]) == ("agrees", "nftables", True)
        listed = node.run("nft", "-a", "list", "chain", "ip", "kproxy", "services")
        (rule,) = [item["text"] for item in kernel["objects"] if item["where"] == "chain services"]
        assert rule in listed
        assert node.run(KPROXY, "explain", "shop/web").count("10.1.2.3:8080  100.0%") == 3


def test_manifests_are_explained_with_the_rules_that_a_proxy_would_write() -> None:
    done = subprocess.run(
        [KPROXY, "explain", "pod", "shop/web:http", "--mode=nftables", f"--manifests={SHOP}"],
        capture_output=True, text=True, check=True,
    )
    assert "10.96.0.10:80/TCP: ClusterIP of shop/web:http, file web.yaml" in done.stdout
    assert "kernel      agrees (nftables, as a proxy would write it)" in done.stdout


def test_the_page_answers_as_the_command_does(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}", "--profiling") as proxy:
        proxy.await_health()

        def page(question: str) -> dict[str, Any]:
            status, body = proxy.get(10249, f"/debug/kproxy/{question}")
            assert status == 200
            found: dict[str, Any] = json.loads(body)
            return found

        command = node.run(KPROXY, "explain", "10.1.9.9", "shop/web", "-o", "json")
        assert page("explain.json?to=shop/web&from=10.1.9.9")["packets"] == json.loads(command)["packets"]
        assert page("explain.json?from=pod") == {
            "problem": "request 'explain': Object missing required field `to`"}
        assert page("services.json?sort=luck") == {
            "problem": "request 'top': sort: Invalid enum value 'luck'"}
        top = json.loads(node.run(KPROXY, "top", "--once", "-o", "json", "--count=1", "--sort=name"))
        assert page("services.json?count=1")["services"] == top["services"]


def test_a_start_imports_no_answers() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, kproxy_core.app.assembly; print(*sys.modules, sep='\\n')"],
        capture_output=True, text=True, check=True,
    ).stdout.split()
    assert "kproxy_core.app.requests" in loaded
    assert not {f"kproxy_core.app.{name}" for name in ("answers", "changes", "explain", "overview", "verify")
                } & set(loaded)  # fmt: skip


def test_questions_without_an_answer_end_with_one_line(node: Namespace) -> None:
    def complaint(*words: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", node.name, KPROXY, "explain", *words],
            capture_output=True, text=True, check=False,
        )
        assert done.returncode in (1, 2)
        return done.stderr.splitlines()[-1]

    assert "no kproxy runs in this network namespace" in complaint("10.96.0.10:80")
    assert "near names: shop/web" in complaint("shop/wbe", "--mode=nftables", f"--manifests={SHOP}")
    assert complaint("web", "--mode=nftables", "--manifests=/none") == (
        "Error: --manifests: /none: there is no such directory")


@pytest.mark.parametrize("words", [("pod", "web", "--from=10.1.9.9"), ("pod", "web", "node")])
def test_a_question_has_one_sender_and_one_receiver(words: tuple[str, ...]) -> None:
    done = subprocess.run([KPROXY, "explain", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "Error: give [FROM] TO"


def test_damage_is_a_difference_until_it_is_repaired(node: Namespace, manifests: Path) -> None:
    """Beside no proxy, so that nothing repairs it."""
    flags = ("--mode=iptables", f"--manifests={manifests}")
    with running(node, *flags) as proxy:
        proxy.await_health()
        assert "does what the plans say" in node.run(KPROXY, "diff")

    def diff(*more: str) -> tuple[int, str]:
        done = subprocess.run(
            ["ip", "netns", "exec", node.name, KPROXY, "diff", *more],
            capture_output=True, text=True, check=False,
        )
        return done.returncode, done.stdout

    assert diff(*flags)[0] == 0
    rules = node.run("iptables", "-t", "nat", "-S", "KUBE-SERVICES").splitlines()
    (rule,) = [line for line in rules if "10.96.0.10" in line]
    node.run("sh", "-c", f"iptables -w -t nat {rule.replace('-A', '-D', 1)}")
    node.run("sh", "-c", "iptables -w -A KUBE-SERVICES -d 10.96.0.66 -p tcp --dport 80 -j DROP")
    node.run("nft", "add", "table", "ip", "kproxy")
    status, text = diff(*flags)
    assert status == 1
    assert "10.96.0.10:80/TCP of shop/web: the packet is not touched, and should be forwarded" in text
    assert "10.96.0.66:80/TCP: the kernel serves it, and no Service wants it" in text
    found = json.loads(diff(*flags, "-o", "json")[1])
    assert {difference["kind"] for difference in found["differences"]} == {"frontend", "stale", "leftover"}
    assert diff() == (1, "")


@pytest.mark.parametrize("words", [("diff",), ("plan",), ("trace", "shop/web")], ids=" ".join)
def test_a_missing_capability_is_named(node: Namespace, manifests: Path, words: tuple[str, ...]) -> None:
    unprivileged = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", KPROXY)
    done = subprocess.run(
        ["ip", "netns", "exec", node.name, *unprivileged, *words, "--mode=nftables",
         f"--manifests={manifests}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "CAP_NET_ADMIN" in done.stderr.splitlines()[-1]


FIREWALL = """
table inet firewalld {
    chain filter_FORWARD {
        type filter hook forward priority filter + 10
        ct state established accept
        ip saddr 10.1.9.9 counter reject with icmpx admin-prohibited
    }
    chain filter_OUTPUT {
        type filter hook output priority filter + 10
        ip daddr 10.1.2.3 tcp dport 8080 meta skuid 1000 drop
    }
}
"""


def test_the_first_chain_of_another_program_that_drops_the_packet_is_named(
    node: Namespace, manifests: Path
) -> None:
    node.ip("address add 192.0.2.1/24 dev lo", "route add default via 192.0.2.254 dev lo")
    node.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    with running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        node.nft(FIREWALL)

        def told(sender: str) -> tuple[str, str, list[str]]:
            (found,) = json.loads(
                node.run(KPROXY, "explain", sender, "10.96.0.10:80", "-o", "json"))["packets"]
            return found["outcome"], found["because"], found["kernel"]["filters"]

        assert told("10.1.9.8") == ("forwarded", "internal traffic policy Cluster", [])
        chain = "nft table inet firewalld, chain filter_FORWARD"
        rule = f"{chain}, rule 2 (firewalld) rejects it (0 packets so far)"
        assert told("10.1.9.9") == ("refused", rule, [
            f"{rule}: ip saddr 10.1.9.9 counter packets 0 bytes 0 reject with icmpx admin-prohibited"])
        doubt = "not understood: meta skuid in rule 1 of chain filter_OUTPUT"
        rule = "nft table inet firewalld, chain filter_OUTPUT, rule 1 (firewalld) may drop it"
        assert told("node") == ("depends", f"dropped: {rule}; forwarded; {doubt}", [
            f"{rule}: ip daddr 10.1.2.3 tcp dport 8080 meta skuid 1000 drop; {doubt}"])
        shown = node.run(KPROXY, "explain", "10.1.9.9", "10.96.0.10:80")
        because = told("10.1.9.9")[1]
        assert f"\n  outcome     refused: {because}\n  remedy      put the pods' networks into" in shown
        assert "\n  filters     nft table inet firewalld, chain" in shown


def test_where_it_is_not_certain_it_leads_to_the_doctor(node: Namespace, manifests: Path) -> None:
    said = ("\n\n`kproxy doctor` looks for what stops packets here, `kproxy trace` watches the next "
            "ones\n")
    node.ip("address add 192.0.2.1/24 dev lo", "route add default via 192.0.2.254 dev lo")
    node.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    with running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        question = (KPROXY, "explain", "10.1.9.9", "10.96.0.10:80")
        assert not node.run(*question).endswith(said)
        node.nft("table inet theirs { chain p { type filter hook prerouting priority -199; "
                 "tcp dport 80 limit rate 1/second drop; }; }")
        text = node.run(*question)
        assert " may drop it" in text
        assert text.endswith(said)
