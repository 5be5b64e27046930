"""Tables of a newer nft, which crash libnftables: every answer about rules names them and does without."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kproxy_core.linux import libnftables
from kproxy_core.linux.libnftables import (
    CommandRefused,
    Crashed,
    NoBinding,
    complaint,
    list_chain,
    list_table,
)
from kproxy_core.linux.libnftables import list_tables as list_all
from kproxy_core.linux.tracing import RuleTexts, TraceEvent
from tests.core.cli.test_cli import manifests, node
from tests.core.cli.test_report_command import members
from tests.core.cli.test_trace_command import TABLE, dial, packets
from tests.core.cli.test_traffic import serving
from tests.core.namespaces import Namespace, own_network
from tests.core.processes import KPROXY, running
from tests.nft_releases.releases import BOOKWORM, RELEASES, TRIXIE, Release

__all__ = ["manifests", "node", "own_network"]

SHOP = Path(__file__).parents[3] / "examples" / "shop"
FOREIGN = """
table ip foreign {
    set s { type ifname; }
    chain output { type filter hook output priority -10; meta l4proto tcp accept; }
}
table bridge switch { set s { type ether_addr; }; }
table ip plain { chain output { type filter hook output priority -5; meta l4proto tcp accept; }; }
"""
"""Two tables that crash nft 1.0.6 if 1.1.3 made them, and one that does not."""
CRASH = "libnftables 1.0.6 crashes (SIGSEGV) on table {}, probably because a newer nft made it"
ON_A_MACHINE_WITH = """
import sys
from kproxy_core.cli import main
from kproxy_core.linux import libnftables
python = sys.argv.pop(1)
libnftables.interpreters = lambda: [python]
main()
"""

on_each = pytest.mark.parametrize("release", RELEASES, ids=str)
alone = pytest.mark.usefixtures("own_network")


def kproxy(release: Release, *words: str) -> list[str]:
    """The command on a machine where *release* is installed."""
    return [sys.executable, "-c", ON_A_MACHINE_WITH, release.python, *words]


@pytest.fixture
def installed(release: Release, monkeypatch: pytest.MonkeyPatch) -> Release:
    """*release* is installed on this machine."""
    monkeypatch.setattr(libnftables, "interpreters", lambda: [release.python])
    return release


def make_foreign(tables: str = FOREIGN) -> None:
    done = TRIXIE.run("-f", "-", stdin=tables)
    assert done.returncode == 0, done.stderr


@alone
@on_each
def test_a_list_of_all_tables_names_those_that_it_leaves_out(installed: Release) -> None:
    make_foreign()
    text, unread = list_all(style=["handle_output"])
    assert "table ip plain {" in text
    assert "meta l4proto tcp accept # handle " in text
    if installed is TRIXIE:
        assert not unread
        assert "table bridge switch {" in text
    else:
        assert unread == (CRASH.format("ip foreign"), CRASH.format("bridge switch"))
        assert list_all("ip").unread == unread[:1]
        assert list_all("inet") == ("", ())


@alone
@on_each
def test_one_table_is_read_beside_any_other(installed: Release) -> None:
    make_foreign()
    assert "meta l4proto tcp accept" in list_table("ip", "plain")
    assert "meta l4proto tcp accept" in list_chain("ip", "plain", "output")
    assert list_table("ip", "none") == ""
    with pytest.raises(CommandRefused, match="No such file"):
        list_chain("ip", "plain", "none")
    if installed is BOOKWORM:
        with pytest.raises(Crashed) as crash:
            list_table("bridge", "switch")
        assert str(crash.value) == CRASH.format("bridge switch")


@alone
@on_each
def test_a_name_is_never_taken_for_a_command(installed: Release) -> None:
    make_foreign("table ip plain { chain output { accept; }; }")
    for name in ("x; delete table ip plain", "x\ndelete table ip plain", "{", ""):
        with pytest.raises(CommandRefused, match="name that nft cannot read"):
            list_table("ip", name)
        with pytest.raises(CommandRefused, match="name that nft cannot read"):
            list_chain("ip", "plain", name)
    assert "accept" in list_table("ip", "plain")


@alone
@on_each
def test_rules_are_checked_whatever_the_kernel_holds_and_none_is_applied(installed: Release) -> None:
    make_foreign()
    assert complaint("add table ip new; add chain ip new c; add rule ip new c accept") == ""
    assert "syntax error" in complaint("add tble ip new")
    assert "No such file" in complaint("add rule ip plain output accept")
    assert "table ip new" not in TRIXIE.run("list", "tables").stdout


def test_a_missing_binding_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(libnftables, "interpreters", lambda: [str(bare)])
    remedy = "as root: apt-get install python3-nftables"
    with pytest.raises(NoBinding, match=remedy):
        list_all()
    found = RuleTexts()
    rule = TraceEvent(1, True, "ip", "plain", "output", 7, "accept", 0, None)
    assert found.text(rule) == "handle 7"
    assert [remedy in problem for problem in found.problems] == [True]


@alone
def test_an_interpreter_without_the_binding_leaves_it_to_that_of_the_distribution() -> None:
    make_foreign("table ip plain { chain output { accept; }; }")
    asked = "from kproxy_core.linux.libnftables import list_tables; print(list_tables().text)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {asked}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "table ip plain {" in done.stdout, done.stderr


@on_each
@pytest.mark.parametrize("mode", ["nftables", "ebpf"])
def test_rendered_rules_are_checked_beside_any_table(node: Namespace, release: Release, mode: str) -> None:
    node.run(TRIXIE.nft, "-f", "-", stdin=FOREIGN)
    before = node.run(TRIXIE.nft, "list", "ruleset")
    flags = (f"--mode={mode}", f"--manifests={SHOP}", "--hostname-override=node1")
    told = node.run(*kproxy(release, "render", "--check", *flags))
    assert told == "".join(
        f"the {family} rules of mode {mode} are accepted\n" for family in ("IPv4", "IPv6"))
    assert node.run(TRIXIE.nft, "list", "ruleset") == before


def test_rules_that_are_not_text_for_nft_are_not_checked(manifests: Path) -> None:
    done = subprocess.run(
        [KPROXY, "render", "--check", "--mode=iptables", f"--manifests={manifests}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: the IPv4 rules of mode iptables cannot be checked: they are not text for nft")


@contextmanager
def traced(node: Namespace, command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A trace, once its rules are in the kernel."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["ip", "netns", "exec", node.name, *command], stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            while TABLE not in node.run(TRIXIE.nft, "list", "tables"):
                assert process.poll() is None
            yield process
        finally:
            process.kill()


@on_each
def test_a_trace_shows_rules_that_it_cannot_read_by_their_handles(
    node: Namespace, manifests: Path, release: Release
) -> None:
    flags = ("--mode=iptables", f"--manifests={manifests}")
    with serving(node, "10.1.2.3"), running(node, *flags) as proxy:
        proxy.await_health()
        node.run(TRIXIE.nft, "-f", "-", stdin=FOREIGN)
        with traced(node, kproxy(release, "trace", "shop/web", "--count=1", "-o", "json")) as trace:
            dial(node, "10.96.0.10", 80)
            (packet,) = packets(trace)
            assert trace.stderr is not None
            problems = trace.stderr.read()
    assert packet["outcome"] == "forwarded"
    rules = {rule["where"]: rule["text"] for rule in packet["rules"]}
    assert rules["ip plain output"] == "meta l4proto tcp accept"
    assert "KUBE-SVC" in rules["ip nat KUBE-SERVICES"]
    if release is TRIXIE:
        assert rules["ip foreign output"] == "meta l4proto tcp accept"
        assert problems == ""
    else:
        assert rules["ip foreign output"].startswith("handle ")
        assert problems == f"Warning: rules are shown by their handles: {CRASH.format('ip foreign')}\n"


@on_each
def test_a_report_has_the_tables_that_can_be_read(node: Namespace, tmp_path: Path, release: Release) -> None:
    node.run(TRIXIE.nft, "-f", "-", stdin=FOREIGN)
    contents = json.loads(node.run(*kproxy(release, "report", str(tmp_path / "a.tar.gz"), "-o", "json")))
    assert "kernel/nft-ruleset.txt" in contents["contents"]
    ruleset = members(tmp_path / "a.tar.gz")["kernel/nft-ruleset.txt"]
    assert "table ip plain {" in ruleset
    if release is TRIXIE:
        assert "table ip foreign {" in ruleset
    else:
        assert ruleset.startswith(f"# {CRASH.format('ip foreign')}\n# {CRASH.format('bridge switch')}\n")


SEVEN = """
apiVersion: v1
kind: Service
metadata: {name: seven, namespace: shop}
spec: {clusterIP: 10.96.0.77, clusterIPs: [10.96.0.77], ipFamilies: [IPv4], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: seven-1, namespace: shop, labels: {kubernetes.io/service-name: seven}}
addressType: IPv4
ports: [{name: "", protocol: TCP, port: 8080}]
endpoints:
""" + "".join(f"- addresses: [10.1.2.{number}]\n" for number in range(11, 18))
"""A Service that needs a chain of its own: no other has seven endpoints."""


def test_a_proxy_serves_beside_tables_that_crash_libnftables(node: Namespace, manifests: Path) -> None:
    node.run(TRIXIE.nft, "-f", "-", stdin=FOREIGN)
    with serving(node, "10.1.2.3"), running(node, "--mode=nftables", f"--manifests={manifests}") as proxy:
        proxy.await_health()
        dial(node, "10.96.0.10", 80)
        (manifests / "seven.yaml").write_text(SEVEN)
        while "tcp-cluster-7" not in node.run(TRIXIE.nft, "list", "table", "ip", "kproxy"):
            assert proxy.health()[0] == 200
        node.run(TRIXIE.nft, "-f", "-", stdin="table inet later { set s { type ifname; }; }")
        (manifests / "seven.yaml").unlink()
        while "10.96.0.77" in node.run(TRIXIE.nft, "list", "table", "ip", "kproxy"):
            assert proxy.health()[0] == 200
        dial(node, "10.96.0.10", 80)
        assert proxy.end()[0] == 0
    assert "table ip kproxy removed" in node.run(KPROXY, "--cleanup")
    assert "kproxy" not in node.run(TRIXIE.nft, "list", "tables")
