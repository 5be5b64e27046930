"""Foreign changes are reported, our own are not."""

import os
import queue
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import pytest

from kproxy_conformance.builders import changed_update, full_update
from kproxy_core.contract.values import BackendSettings, Damage
from kproxy_core.linux import programs
from kproxy_core.model.address import Family
from kproxy_iptables.backend import IptablesBackend
from tests.patience import PATIENCE
from tests.plugins.iptables.rig import LEGACY, NFT, V4, V6, run
from tests.plugins.iptables.scenes import NODES, all_plans, plain

PLANS = all_plans(V4, plain(1, 1, 2))


class Reports:
    """Collects the reports of a watch."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Family, str]] = SimpleQueue()

    def __call__(self, family: Family, what: str) -> None:
        self._queue.put((family, what))

    def wait(self) -> tuple[Family, str]:
        """Return the next report."""
        return self._queue.get(timeout=PATIENCE)

    def all_until(self, marker: Callable[[], None], sign: str) -> list[tuple[Family, str]]:
        """Return the reports before that of *marker*, an action whose report contains *sign*."""
        marker()
        found = []
        while sign not in (report := self.wait())[1]:
            found.append(report)
        return found


@contextmanager
def watched(interface: str, monkeypatch: pytest.MonkeyPatch, damaged: Damage) -> Iterator[IptablesBackend]:
    """Yield a backend that has synced both families and is watching."""
    use(interface, monkeypatch)
    backend = IptablesBackend(BackendSettings((V4, V6), options={"syncPeriod": 0.05}))
    try:
        backend.sync(full_update(NODES[V4], PLANS))
        backend.sync(full_update(NODES[V6], all_plans(V6, plain(1, 1))))
        assert backend.watch(damaged)
        yield backend
    finally:
        backend.close()


def use(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all variants but the one for *interface*."""
    kind = "nft" if interface == NFT else "legacy"
    directory = os.environ["KPROXY_TEST_PROGRAMS"]
    for base in ("iptables", "ip6tables"):
        for action in ("", "-save", "-restore"):
            os.symlink(f"/usr/sbin/{base}-{kind}{action}", f"{directory}/{base}{action}")
    monkeypatch.setattr(programs, "find", partial(shutil.which, path=directory))


@pytest.fixture(autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROXY_TEST_PROGRAMS", str(tmp_path_factory.mktemp("programs")))


DAMAGE = {
    "flush of everything": ["nft", "flush", "ruleset"],
    "flush of a table's rules": ["iptables-nft", "-t", "nat", "-F"],
    "deleted rule": ["iptables-nft", "-t", "nat", "-D", "KUBE-SERVICES", "1"],
    "deleted jump": ["iptables-nft", "-t", "filter", "-D", "FORWARD", "1"],
    "added rule": ["iptables-nft", "-t", "nat", "-I", "KUBE-SERVICES", "-j", "ACCEPT"],
    "emptied chain": ["iptables-nft", "-t", "filter", "-F", "KUBE-FORWARD"],
    "rules of kubelet's chain": ["iptables-nft", "-t", "filter", "-F", "KUBE-FIREWALL"],
    "jump to kubelet's chain": ["iptables-nft", "-t", "filter", "-D", "INPUT", "-j", "KUBE-FIREWALL"],
    "dormant table": ["nft", "add table ip nat { flags dormant; }"],
    "stale chain": ["iptables-nft", "-t", "nat", "-N", "KUBE-SEP-AAAAAAAAAAAAAAAA"],
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_reported_at_once_and_repaired(
    netns: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    reports = Reports()
    with watched(NFT, monkeypatch, reports) as backend:
        before = run(NFT, "save") + _flags()
        subprocess.run(DAMAGE[what], check=True)
        assert V4 in {reports.wait()[0] for _ in range(2 if what == "flush of everything" else 1)}
        backend.sync(full_update(NODES[V4], PLANS))
        assert sorted(_rules(run(NFT, "save") + _flags())) == sorted(_rules(before))


def _rules(saved: str) -> list[str]:
    """Return rules and our chains. Built-in chains have counters."""
    return [line for line in saved.splitlines() if line.startswith(("-A", ":KUBE-", "flags"))]


def _flags() -> str:
    """Return the flags of the nat table, which iptables does not show."""
    command = ["nft", "list", "table", "ip", "nat"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return "".join(f"{line.strip()}\n" for line in listed.stdout.splitlines() if "flags" in line)


def test_our_own_changes_are_not_damage(netns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    with watched(NFT, monkeypatch, reports) as backend:
        for endpoint in range(2, 8):
            plans = all_plans(V4, plain(1, endpoint))
            backend.sync(changed_update(NODES[V4], plans, plans))
        assert reports.all_until(_delete_a_rule, "rule deleted") == []


def test_changes_of_foreign_rules_are_not_damage(netns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    with watched(NFT, monkeypatch, reports):
        for arguments in (
            "-t nat -N FOREIGN", "-t nat -A FOREIGN -d 192.0.2.1 -j RETURN",
            "-t nat -I POSTROUTING -j FOREIGN", "-t nat -D POSTROUTING -j FOREIGN",
            "-t nat -F FOREIGN", "-t nat -X FOREIGN",
            "-t filter -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP",
            "-t filter -N KUBE-KUBELET-CANARY", "-t filter -X KUBE-KUBELET-CANARY",
        ):  # fmt: skip
            subprocess.run(["iptables-nft", *arguments.split()], check=True)
        subprocess.run(["nft", "add table ip other; delete table ip other"], check=True)
        assert reports.all_until(_delete_a_rule, "rule deleted") == []


def _delete_a_rule() -> None:
    subprocess.run(["iptables-nft", "-t", "nat", "-D", "KUBE-SERVICES", "1"], check=True)


def test_changes_before_the_watch_starts_are_damage(netns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    use(NFT, monkeypatch)
    reports = Reports()
    backend = IptablesBackend(BackendSettings((V4,)))
    backend.sync(full_update(NODES[V4], PLANS))
    _delete_a_rule()
    try:
        assert backend.watch(reports)
        assert reports.wait()[0] is V4
    finally:
        backend.close()


def test_a_legacy_flush_is_reported_when_all_canaries_are_gone(
    netns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    with watched(LEGACY, monkeypatch, reports) as backend:
        before = run(LEGACY, "save")
        for table in ("mangle", "nat", "filter"):
            for action in ("-F", "-X"):
                subprocess.run(["iptables-legacy", "-w", "5", "-t", table, action], check=True)
        assert reports.wait() == (V4, "flushed: mangle, nat, filter")
        backend.sync(full_update(NODES[V4], PLANS))
        assert sorted(_rules(run(LEGACY, "save"))) == sorted(_rules(before))


@pytest.mark.parametrize(
    ("what", "where"), [(["-F"], "OUTPUT of nat, PREROUTING of nat, POSTROUTING of nat"),
                        (["-D", "PREROUTING", "1"], "PREROUTING of nat")],
)  # fmt: skip
def test_a_legacy_flush_that_leaves_chains_is_reported(
    netns: None, monkeypatch: pytest.MonkeyPatch, what: list[str], where: str
) -> None:
    reports = Reports()
    with watched(LEGACY, monkeypatch, reports) as backend:
        before = run(LEGACY, "save")
        subprocess.run(["iptables-legacy", "-w", "5", "-t", "nat", *what], check=True)
        assert reports.wait() == (V4, f"no jump to our chains in {where}")
        backend.sync(full_update(NODES[V4], PLANS))
        assert sorted(_rules(run(LEGACY, "save"))) == sorted(_rules(before))


def test_a_closed_watch_is_silent(netns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    with watched(NFT, monkeypatch, reports):
        pass
    _delete_a_rule()
    with pytest.raises(queue.Empty):
        reports._queue.get(timeout=0.3)
