"""Requirements that the plugin finds met or missing on this machine."""

import subprocess

import pytest

from kproxy_core.contract.values import BackendSettings, Detection
from kproxy_core.linux import process, programs, trial
from kproxy_iptables.detect import detect
from tests.plugins.iptables.rig import LEGACY, NFT, V4, V6, run
from tests.rights import program

BOTH = BackendSettings((V4, V6))


def tried(settings: BackendSettings) -> Detection:
    """Detect as ``kproxy modes --probe`` does."""
    return trial.run_in_child(lambda namespace: detect(settings, namespace, load_modules=False))


def what(detection: Detection) -> dict[str, bool]:
    """Return the results by requirement, without guesses."""
    return {r.what: r.met for r in detection.requirements if not r.guessed}


@pytest.mark.parametrize("interface", [NFT, LEGACY])
def test_each_match_and_target_is_tried_with_the_programs_of_the_node(netns: None, interface: str) -> None:
    run(interface, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    detection = tried(BOTH)
    assert detection.usable, detection.because
    assert not [r for r in detection.requirements if r.guessed]
    assert f"({interface})" in detection.because
    assert {"IPv4: recent match", "IPv6: statistic match", "IPv6: MASQUERADE --random-fully"} <= set(
        what(detection)
    )
    assert "KPROXY" not in run(interface, "save")


def test_detection_without_a_trial_creates_nothing(netns: None) -> None:
    program("iptables")
    detection = detect(BOTH, None, load_modules=False)
    assert detection.usable
    assert {"IPv4: nat table", "IPv6: nat table"} <= set(what(detection))
    assert [r.what for r in detection.requirements if r.what == "IPv4: recent match" and r.guessed]
    listed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_only_node_ports_on_localhost_require_the_sysctl(netns: None) -> None:
    wanted = [r.found for r in tried(BOTH).requirements if "route_localnet" in r.what]
    assert wanted == ["is 0, and can be set"]
    for without in (
        BackendSettings((V4, V6), options={"localhostNodePorts": False}),
        BackendSettings((V4, V6), loopback_node_ports=(V6,)),
    ):
        assert not [r for r in tried(without).requirements if "route_localnet" in r.what]


def test_only_the_refused_feature_is_missing(
    netns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake program refuses the recent match."""
    program("iptables")
    real = programs.run

    def run_without_recent(*argv: str, stdin: str = "", **rest: object) -> programs.Done:
        if "-m recent" in stdin:
            return programs.Done(argv, 2, "", "Couldn't load match `recent'")
        return real(*argv, stdin=stdin, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(programs, "run", run_without_recent)
    missing = [r for r in tried(BackendSettings((V4,))).requirements if not r.met]
    assert [r.what for r in missing] == ["IPv4: recent match"]
    assert "Couldn't load match" in missing[0].found


def test_a_missing_iptables_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find", lambda name: None)
    detection = detect(BackendSettings((V4,)), None, load_modules=False)
    assert detection.refuted
    assert "iptables is not installed. install iptables 1.8 or newer" in detection.because


@pytest.mark.parametrize(
    ("interface", "held", "missing"),
    [
        (NFT, {"CAP_NET_ADMIN"}, ""),
        (NFT, {"CAP_NET_RAW"}, "CAP_NET_ADMIN: no CAP_NET_ADMIN over this network namespace. "
         "run as root or with CAP_NET_ADMIN"),
        (LEGACY, {"CAP_NET_ADMIN"}, "CAP_NET_ADMIN and CAP_NET_RAW: no CAP_NET_RAW over this "
         "network namespace. "
         "run as root or with CAP_NET_ADMIN and CAP_NET_RAW"),
    ],
)  # fmt: skip
def test_each_variant_has_its_own_required_privileges(
    netns: None, interface: str, held: set[str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(interface, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    monkeypatch.setattr(process, "network_privileges", lambda: frozenset(held))
    detection = tried(BOTH)
    assert detection.usable is (not missing)
    assert detection.because == missing or not missing
