"""Detection of the mode's requirements on this machine."""

import subprocess

import pytest

from kproxy_conformance.builders import full_update, node_view
from kproxy_core.contract.values import BackendSettings, Detection
from kproxy_core.linux import process, trial
from kproxy_core.model.address import Family
from kproxy_core.netlink.messages import NETLINK_NETFILTER, NFGENMSG, attributes, messages
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.messages import KIND
from kproxy_core.nft.objects import DORMANT, OWNER, PERSIST, Chain
from kproxy_core.nft.rules import Expression, Statement
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.detect import FEATURES, Feature, detect, lacking
from kproxy_nftables.kernel import Kernel

pytestmark = pytest.mark.usefixtures("netns")

BOTH = BackendSettings(families=tuple(Family))
NEWTABLE = KIND | 0
NFNLGRP_NFTABLES = 7
QUANTUM = Statement("quantum", (Expression("quantum", {}),))
UNHEARD = Feature("quantum lookup", (), lambda family: [Chain("rules", ((QUANTUM,),))])


def nft(command: str) -> str:
    return subprocess.run(["nft", command], capture_output=True, text=True, check=True).stdout


def tried() -> Detection:
    """Detect as ``kproxy modes --probe`` does."""
    return trial.run_in_child(lambda namespace: detect(BOTH, namespace, load_modules=False))


def test_each_feature_is_tried_in_a_namespace_and_leaves_no_trace() -> None:
    found = tried()
    assert found.usable, found.because
    assert not [requirement for requirement in found.requirements if requirement.guessed]
    names = {requirement.what for requirement in found.requirements}
    assert {f"ip6: {feature.what}" for feature in FEATURES} < names
    assert nft("list ruleset") == ""


def test_without_a_trial_the_kernel_checks_the_rules_without_applying_them() -> None:
    found = detect(BOTH, None, load_modules=False)
    assert found.usable, found.because
    assert {"ip: all rules of the mode", "ip6: all rules of the mode"} <= {
        r.what for r in found.requirements if not r.guessed
    }
    assert nft("list ruleset") == ""


def test_a_refused_feature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_nftables.detect.FEATURES", (*FEATURES, UNHEARD))
    missing = [r for r in tried().requirements if not r.met]
    assert [r.what for r in missing] == ["ip: quantum lookup", "ip6: quantum lookup"]


@pytest.mark.parametrize("release", ["5.4.0-old", "4.18.0-553.el8"])
def test_an_old_kernel_with_all_features_is_accepted(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    (version, *_) = tried().requirements
    assert version.met
    assert "which has what is needed" in version.found


def test_without_the_privilege_features_are_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "network_privileges", frozenset)
    found = detect(BOTH, None, load_modules=False)
    assert found.refuted
    assert found.because == (
        "CAP_NET_ADMIN: not held over this network namespace. run as root or with CAP_NET_ADMIN")
    assert {r.guessed for r in found.requirements if r.what.endswith("of the mode")} == {True}


def test_starting_a_backend_tries_the_features_and_leaves_no_trace() -> None:
    backend = NftablesBackend(BOTH)
    assert backend.begin()
    assert nft("list ruleset") == ""
    backend.close()


def test_a_missing_feature_is_named() -> None:
    kernel = Kernel()
    first, second = lacking(kernel, tuple(Family), (*FEATURES, UNHEARD))
    assert first.startswith(
        "no quantum lookup in family ip (nf_tables refuses 'add rule ip kproxy-check rules quantum': ")
    assert second.startswith("no quantum lookup in family ip6 ")
    kernel.close()


def test_a_check_never_affects_packets() -> None:
    tables: list[dict[int, bytes]] = []
    announced = NetlinkSocket.open(NETLINK_NETFILTER, groups=[NFNLGRP_NFTABLES])
    with Kernel() as kernel, announced:
        assert lacking(kernel, tuple(Family)) == []
        for data in announced.pending()[0]:
            tables += [
                attributes(data, start + NFGENMSG.size, end)
                for kind, _, _, start, end in messages(data) if kind == NEWTABLE
            ]
    assert [table[1] for table in tables] == [b"kproxy-check\0"] * 2 * len(FEATURES)
    assert {int.from_bytes(table[2], "big") & DORMANT for table in tables} == {DORMANT}


WITH_FLOWTABLE = BackendSettings(families=tuple(Family), options={"flowtable": ["lo"]})


def test_a_mode_without_flow_offload_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_nftables.detect.FLOW_OFFLOAD", UNHEARD)
    found = trial.run_in_child(lambda namespace: detect(WITH_FLOWTABLE, namespace, load_modules=False))
    assert found.usable, found.because
    optional = [r.found for r in found.requirements if "quantum lookup" in r.what]
    assert len(optional) == 2
    assert all(text.endswith("flows are forwarded without it") for text in optional)


@pytest.mark.parametrize("flags", [OWNER | PERSIST, 1 << 31], ids=["known", "unknown"])
def test_the_probe_tells_whether_tables_can_have_an_owner(
    monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    monkeypatch.setattr("kproxy_nftables.detect.PERSIST", flags)
    owning = BackendSettings(families=tuple(Family), own_tables=True)
    found = trial.run_in_child(lambda namespace: detect(owning, namespace, load_modules=False))
    assert found.usable, found.because
    (owned,) = [r for r in found.requirements if "only kproxy can change" in r.what]
    assert owned.met
    assert ("any process can change the rules" in owned.found) is (flags == 1 << 31)


def test_a_backend_serves_without_a_flowtable_where_the_kernel_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kproxy_nftables.backend.FLOW_OFFLOAD", UNHEARD)
    backend = NftablesBackend(WITH_FLOWTABLE)
    assert backend.begin()
    backend.sync(full_update(node_view(), {}))
    backend.close()
    assert "flowtable" not in nft("list ruleset")
    assert [record.message for record in caplog.records] == ["flowtable not available"]
