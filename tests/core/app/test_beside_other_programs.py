"""Tables and rules of other programs, as admins, VPNs and firewalls write them, beside each mode."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.core.cli.test_cli import manifests, node
from tests.core.cli.test_traffic import serving
from tests.core.namespaces import Namespace
from tests.core.processes import kproxy, running
from tests.nft_releases.releases import TRIXIE

__all__ = ["manifests", "node"]

DIAL = "import socket; socket.create_connection(('10.96.0.10', 80), 10)"
BY_NEWER_IPTABLES = """
*filter
:FOREIGN - [0:0]
-A FORWARD -j FOREIGN
-A FOREIGN -p tcp -m tcp --dport 1000:2000 -m comment --comment "a foreign rule" -j ACCEPT
-A FOREIGN -p tcp -m multiport --dports 22,80 -m conntrack --ctstate NEW -m limit --limit 5/min -j LOG
-A FOREIGN -m mac --mac-source 02:00:00:00:00:01 -j DROP
-A FOREIGN -p udp -m length --length 100:200 -j REJECT
COMMIT
*nat
:FOREIGN - [0:0]
-A POSTROUTING -j FOREIGN
-A FOREIGN -s 192.0.2.0/24 ! -d 192.0.2.0/24 -j MASQUERADE --random-fully
-A PREROUTING -d 192.0.2.99/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.98:8080
COMMIT
*mangle
-A POSTROUTING -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
COMMIT
"""
DROPPED = """
table inet firewall {
    chain input { type filter hook input priority 0; policy drop; iif lo accept; }
    chain forward { type filter hook forward priority 0; policy drop; }
    chain output { type filter hook output priority 0; policy drop; oif lo accept; }
}
"""
Situation = Callable[[Namespace, Path, pytest.MonkeyPatch, ExitStack], None]


def nft(text: str) -> Situation:
    return lambda node, *_: node.nft(text)


def newer_iptables(node: Namespace, *_: object) -> None:
    node.run(TRIXIE.iptables, "iptables-restore", "--noflush", stdin=BY_NEWER_IPTABLES)


def many_rules(node: Namespace, *_: object) -> None:
    """Have 20,000 rules in tables filter and nat each."""
    rules = "".join(
        f"-A FOREIGN -s 10.200.{number // 250}.{number % 250}/32 -p tcp -m tcp --dport 80 -j RETURN\n"
        for number in range(20_000))
    node.run("iptables-restore", "--noflush", stdin="".join(
        f"*{table}\n:FOREIGN - [0:0]\n-A OUTPUT -j FOREIGN\n{rules}COMMIT\n" for table in ("filter", "nat")))


def policy_drop(node: Namespace, *_: object) -> None:
    node.nft(DROPPED)
    node.run("iptables", "-P", "FORWARD", "DROP")


def only_counts(node: Namespace, *_: object) -> None:
    """Have rules without matches and targets."""
    for table in ("filter", "nat"):
        node.run("iptables", "-t", table, "-A", "OUTPUT")


def owned(table: str) -> Situation:
    def hold(node: Namespace, _path: Path, _patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        """Have a table belong to a process that runs until the end of the test."""
        owner = stack.enter_context(subprocess.Popen(
            ["ip", "netns", "exec", node.name, "nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            text=True))
        assert owner.stdin is not None
        owner.stdin.write(f"add table {table} {{ flags owner; }}\n")
        owner.stdin.flush()
        while f"table {table}" not in node.run("nft", "list", "tables"):
            assert owner.poll() is None

    return hold


def missing_extension(
    node: Namespace, path: Path, patch: pytest.MonkeyPatch, _stack: ExitStack
) -> None:
    """Have a rule with a match that only the program that wrote it knows."""
    rules = ":FOREIGN - [0:0]\n-A FOREIGN -m length --length 10:20 -j ACCEPT\nCOMMIT\n"
    node.run("iptables-restore", "--noflush", stdin=f"*filter\n{rules}")
    (known,) = {library.parent for library in Path("/usr/lib").rglob("xtables/libxt_length.so")}
    shutil.copytree(known, path / "xtables", symlinks=True)
    (path / "xtables/libxt_length.so").unlink()
    patch.setenv("XTABLES_LIBDIR", str(path / "xtables"))


def native_rule(table: str, hook: str, rule: str) -> Situation:
    """Have a rule that no program of iptables can write, in one of their chains."""
    place, _, priority = hook.partition(" ")
    kind = {"nat": "nat", "mangle": "route", "filter": "filter"}[table.split()[1]]
    return nft(f"table {table} {{ chain {place.upper()} {{\n"
               f"type {kind} hook {place} priority {priority}\n{rule}\n}}; }}")  # fmt: skip


HARMLESS = {
    "rules of iptables 1.8.11": newer_iptables,
    "20,000 rules": many_rules,
    "policy drop": policy_drop,
    "rules that only count": only_counts,
    "table with an owner": owned("inet theirs"),
    "dormant ip nat": nft(
        "table ip nat { flags dormant; chain POSTROUTING { type nat hook postrouting priority srcnat; }; }"),
}
MASQUERADE = "ip daddr 1.2.3.4 masquerade persistent"
MARK = "ip daddr 1.2.3.4 meta mark set numgen inc mod 2"
HARMFUL = {
    "native rule in ip nat": native_rule("ip nat", "postrouting 100", MASQUERADE),
    "native rule in ip filter": native_rule("ip filter", "output 0", MARK),
    "native rule in ip mangle": native_rule("ip mangle", "output -150", MARK),
    "native rule in ip6 nat": native_rule(
        "ip6 nat", "postrouting 100", MASQUERADE.replace("ip daddr 1.2.3.4", "ip6 daddr 2001:db8::1")),
    "ip nat with an owner": owned("ip nat"),
    "ip filter with an owner": owned("ip filter"),
    "missing extension": missing_extension,
}
"""The programs of iptables do not work with these tables."""


def serving_mode(
    situation: Situation, mode: str, node: Namespace, manifests: Path, path: Path, patch: pytest.MonkeyPatch
) -> str:
    """Return the mode that a proxy for *mode* serves in, and check that it does and forwards."""
    with ExitStack() as stack:
        situation(node, path, patch, stack)
        stack.enter_context(serving(node, "10.1.2.3"))
        proxy = stack.enter_context(running(
            node, f"--mode={mode}", f"--manifests={manifests}", "--hostname-override=node1"))
        proxy.await_health()
        node.run(sys.executable, "-c", DIAL)
        return proxy.get(10249, "/proxyMode")[1]


@pytest.mark.parametrize("mode", ["nftables", "iptables", "userspace"])
@pytest.mark.parametrize("situation", HARMLESS)
def test_other_programs_do_not_keep_a_mode_from_serving(
    node: Namespace, manifests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str,
    situation: str,
) -> None:
    assert serving_mode(HARMLESS[situation], mode, node, manifests, tmp_path, monkeypatch) == mode


@pytest.mark.parametrize("situation", ["native rule in ip nat", "missing extension"])
def test_a_probe_tells_what_other_programs_have_done(
    node: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: str
) -> None:
    with ExitStack() as stack:
        HARMFUL[situation](node, tmp_path, monkeypatch, stack)
        done = kproxy("modes", "--probe", "-v", "--mode=iptables", node=node)
    assert "missing  tables of IPv4 that other programs leave usable for iptables: " in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(("mode", "served"), [
    ("nftables", "nftables"), ("iptables", "nftables"), ("userspace", "userspace")])  # fmt: skip
@pytest.mark.parametrize("situation", HARMFUL)
def test_nothing_needs_the_programs_of_iptables_where_these_do_not_work(
    node: Namespace, manifests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, served: str,
    situation: str,
) -> None:
    assert serving_mode(HARMFUL[situation], mode, node, manifests, tmp_path, monkeypatch) == served
