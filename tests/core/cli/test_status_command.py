"""``kproxy status``: whether a node's proxy is well."""

import json
import subprocess
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kproxy_core import __version__
from kproxy_core.app.overview import Overview
from kproxy_core.app.replies import ProxyStatus
from kproxy_core.cli.status import age, as_text
from kproxy_core.contract.values import Fallback
from kproxy_core.model.address import Family
from kproxy_core.observe.health import ProxyHealth
from kproxy_core.observe.pages import About
from kproxy_core.sync.loop import Loop
from tests.core.cli.sides import FLAGS, sides, write
from tests.core.namespaces import namespace
from tests.core.processes import kproxy, running
from tests.core.sync_events import synced

FOUND = {
    "node": "n1", "mode": "iptables", "configured": "nftables", "version": "0.2.0", "commit": "0123456789ab",
    "now": 100_000.0, "started": 10_000.0, "well": False, "since": 99_900.0, "problems": ["IPv4: busy"],
    "fallback": "", "last_sync": None, "lag": 130.0, "foreign_changes": 3,
    "healthz": {"code": 503, "body": {"nodeEligible": False}},
}  # fmt: skip


def test_problems_come_first() -> None:
    assert as_text(msgspec.convert(FOUND | {"findings": ["mtu", "clock"]}, ProxyStatus)).splitlines() == [
        "n1: \x1b[31m\x1b[1mnot well\x1b[0m for 100 s",
        "  \x1b[31m\x1b[1mIPv4: busy\x1b[0m",
        "mode             iptables, configured: nftables",
        "version          0.2.0 (0123456789ab), running for 25 h",
        "last sync        never",
        "changes          the oldest has been waiting for 2 min",
        "foreign changes  3",
        "/healthz         503, the node is not eligible",
        "doctor           \x1b[33m2: mtu, clock; `kproxy doctor` has evidence and remedies\x1b[0m",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"),
     (47.6 * 3600, "48 h"), (48 * 3600, "2 d")],
)
def test_ages_have_the_largest_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    assert age(seconds) == text


def modes() -> dict[str, str]:
    return {"configured": ""}


def test_a_fallback_is_named_while_it_serves() -> None:
    health = ProxyHealth((Family.IPV4,), timeout=60, node_required=False)
    health.sync_succeeded(synced(Family.IPV4))
    about = About(mode="iptables", version="0", configuration={}, flags={}, started=5.0)
    about.fallback = Fallback("nftables", "iptables", "no nf_tables")
    overview = Overview(cast(Loop, None), health, tuple, about, None, None, "n1", modes)
    assert overview.condition().fallback == str(about.fallback)
    about.mode = "nftables"
    assert overview.condition().fallback == ""


def test_problems_are_asked_for_once() -> None:
    health = ProxyHealth((Family.IPV4,), timeout=60, node_required=False)
    asked: list[str] = []

    def read() -> list[str]:
        asked.append("")
        return ["a problem"]

    health.include("objects", read)
    about = About(mode="nftables", version="0", configuration={}, flags={}, started=5.0)
    overview = Overview(cast(Loop, None), health, tuple, about, None, None, "n1", modes)
    condition = overview.condition()
    assert condition.healthz is not None
    assert (len(asked), condition.healthz.body["problems"]) == (1, condition.problems)


def test_a_running_proxy_tells_that_it_is_well(tmp_path: Path) -> None:
    with namespace() as node:
        def status(*more: str) -> "subprocess.CompletedProcess[str]":
            return kproxy("status", *more, node=node)

        done = status()
        assert (done.returncode, done.stderr) == (1, "Error: no kproxy runs in this network namespace\n")
        with running(node, "--mode=nftables", f"--manifests={tmp_path}", "--hostname-override=n1") as proxy:
            proxy.await_health()
            node.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            done = status("-o", "json")
            first = status().stdout.splitlines()[0]
    assert done.returncode == 0
    found: dict[str, Any] = json.loads(done.stdout)
    assert first.startswith("n1: well for ")
    assert (found["mode"], found["configured"], found["version"]) == ("nftables", "nftables", __version__)
    assert (found["problems"], found["lag"], found["healthz"]["code"]) == ([], 0, 200)
    assert found["started"] < found["last_sync"] <= found["since"] <= found["now"]
    assert isinstance(found["findings"], list)


@pytest.mark.parametrize(("mode", "well"), [("nftables", False), ("userspace", True)])
def test_a_node_that_forwards_nothing_is_well_where_relays_serve(
    tmp_path: Path, mode: str, well: bool
) -> None:
    write(tmp_path)
    with sides() as made, running(made.node, f"--mode={mode}", f"--manifests={tmp_path}", *FLAGS) as proxy:
        proxy.await_health()
        made.node.run("sysctl", "-qw", "net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0")
        made.node.nft("table inet theirs { chain f { type filter hook forward priority 0; policy drop; }; }")
        assert made.dial("veth", "ip") == ("answered" if well else "silence")
        done = kproxy("status", "-o", "json", node=made.node)
        found = json.loads(done.stdout)
    assert (done.returncode == 0, found["well"]) == (well, well), found["problems"]
    lost = {"ip-forward", "firewall"} & set(found["findings"])
    assert lost == (set() if well else {"ip-forward", "firewall"})
