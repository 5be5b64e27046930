"""A clean-up removes our rules and chains and no others."""

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from kproxy_conformance.checks.privileges import without_privileges
from kproxy_core.linux import programs
from kproxy_core.model.address import Family
from kproxy_iptables.cleanup import cleanup
from tests.plugins.iptables.rig import INTERFACES, NFT, V4, family_state, run
from tests.plugins.iptables.scenes import NODES, Scene, all_plans, plain

EVERYTHING = (
    plain(1, 1, 2),
    Scene(2, "UDP", (), "node port", True, True, True),
    Scene(3, "TCP", (1, 2), "ranges", True, True, True),
    Scene(4, "TCP", (1,), "load balancer", False, False, True),
)

FOREIGN = """*nat
:FOREIGN - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
-A PREROUTING -d 192.0.2.3/32 -j FOREIGN
-A FOREIGN -d 192.0.2.2/32 -m comment --comment "not -j KUBE-SERVICES" -j RETURN
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
*mangle
-A FORWARD -s 192.0.2.9/32 -j ACCEPT
COMMIT
"""

IPVS = """*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -j MASQUERADE
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
COMMIT
*filter
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
-A INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"""
"""A few of the rules of kube-proxy's ipvs mode."""


def saved(interface: str, family: Family = V4) -> list[str]:
    """Return all rules and chains."""
    lines = run(interface, "save", family=family).splitlines()
    return sorted(
        line.partition(" [")[0] for line in lines
        if line.startswith("-A") or (line.startswith(":") and " - " in line)
    )  # fmt: skip


@pytest.mark.parametrize("interface", INTERFACES)
def test_foreign_rules_and_chains_are_kept(netns: None, interface: str) -> None:
    run(interface, "restore", "--noflush", stdin=FOREIGN)
    before = saved(interface)
    for family in Family:
        family_state(interface, family).resync(NODES[family], all_plans(family, *EVERYTHING))
    left = cleanup(dry_run=False)
    assert left.errors == ()
    # kube-proxy keeps the rule against spoofed loopback addresses, because kubelet needs it as well.
    localnet = [line for line in saved(interface) if "block incoming localnet connections" in line]
    assert len(localnet) == 1
    assert [line for line in saved(interface) if line not in localnet] == before
    assert saved(interface, Family.IPV6) == sorted(
        [":KUBE-FIREWALL -", "-A INPUT -j KUBE-FIREWALL", "-A OUTPUT -j KUBE-FIREWALL"]
    )


@pytest.mark.parametrize("interface", INTERFACES)
def test_removed_objects_are_listed(netns: None, interface: str) -> None:
    family_state(interface).resync(NODES[V4], all_plans(V4, *EVERYTHING))
    before = saved(interface)
    dry = cleanup(dry_run=True)
    assert saved(interface) == before
    done = cleanup(dry_run=False)
    assert dry == done
    program = "iptables-nft" if interface == NFT else "iptables-legacy"
    for line in (
        "chain KUBE-SERVICES of table nat",
        "chain KUBE-SERVICES of table filter",
        "chain KUBE-PROXY-CANARY of table mangle",
        "5 chains KUBE-SEP-* of table nat",
        "rule in POSTROUTING of table nat:"
        ' -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING',
    ):
        assert f"{program}: {line}" in done.removed


def test_nothing_is_removed_from_an_empty_kernel(netns: None) -> None:
    left = cleanup(dry_run=False)
    assert (left.removed, left.errors) == ((), ())
    assert run(NFT, "save") == ""


@pytest.mark.parametrize(
    ("complaint", "errors"),
    [
        ("can't initialize table: Table does not exist (do you need to insmod?)", 0),
        ("Could not fetch rule set generation id: Permission denied (you must be root)", 2),
    ],
)
def test_an_interface_that_the_kernel_lacks_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: str, errors: int
) -> None:
    for name in ("iptables", "ip6tables"):
        for action in ("", "-save", "-restore"):
            program = tmp_path / f"{name}{action}"
            program.write_text(
                "#!/bin/sh\n"
                f"test \"$1\" = --version && echo '{name} v1.8.9 (nf_tables)' && exit\n"
                f'echo "{complaint}" >&2; exit 3\n'
            )
            program.chmod(0o755)
    monkeypatch.setattr(programs, "find", partial(shutil.which, path=str(tmp_path)))
    left = cleanup(dry_run=False)
    assert (left.removed, len(left.errors)) == ((), errors)


@pytest.mark.parametrize("interface", INTERFACES)
def test_chains_that_the_ipvs_mode_uses_are_kept(netns: None, interface: str) -> None:
    subprocess.run(["ipset", "create", "KUBE-LOAD-BALANCER", "hash:ip,port"], check=True)
    run(interface, "restore", "--noflush", stdin=IPVS)
    before = saved(interface)
    leftovers = "*nat\n:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]\n:KUBE-NODEPORTS - [0:0]\nCOMMIT\n"
    run(interface, "restore", "--noflush", stdin=leftovers)
    assert cleanup(dry_run=False).errors == ()
    assert saved(interface) == before


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("serves", [False, True])
def test_chains_in_a_loop_are_removed(netns: None, interface: str, serves: bool) -> None:
    """The kernel accepts a loop that no packet can enter."""
    one, other = "KUBE-SVC-AAAAAAAAAAAAAAAA", "KUBE-SEP-BBBBBBBBBBBBBBBB"
    run(interface, "restore", "--noflush", stdin=(
        f"*nat\n:{one} - [0:0]\n:{other} - [0:0]\n-A {one} -j {other}\n-A {other} -j {one}\nCOMMIT\n"
    ))  # fmt: skip
    if serves:
        family_state(interface).resync(NODES[V4], all_plans(V4, *EVERYTHING))
        assert not any(one in line or other in line for line in saved(interface))
    assert cleanup(dry_run=False).errors == ()
    assert not any("KUBE-S" in line for line in saved(interface))


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_chain_with_a_foreign_jump_is_kept_and_reported(netns: None, interface: str) -> None:
    family_state(interface).resync(NODES[V4], all_plans(V4, *EVERYTHING))
    run(interface, "-t", "nat", "-N", "CNI-HOSTPORT")
    run(interface, "-t", "nat", "-A", "CNI-HOSTPORT", "-j", "KUBE-MARK-MASQ")
    left = cleanup(dry_run=False)
    assert [error.partition(": ")[2] for error in left.errors] == [
        "chain KUBE-MARK-MASQ of table nat is kept: a rule in CNI-HOSTPORT jumps to it"
    ]
    assert "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000" in saved(interface)
    assert not any("KUBE-SVC" in line for line in saved(interface))


def test_a_clean_up_without_privileges_reports_that_tables_could_not_be_looked_up() -> None:
    with without_privileges():
        left = cleanup(dry_run=True)
    assert [error for error in left.errors if "kproxy-counts" in error] == [
        f"iptables: cannot look up table {family} kproxy-counts: Operation not permitted"
        for family in ("ip", "ip6")
    ]
