"""Which iptables a node uses, from what is in its kernel."""

import subprocess
from collections.abc import Iterator

import pytest

from kproxy_core.backend.api import BackendSettings
from kproxy_iptables import kernel
from kproxy_iptables.hooks import kproxy_detect
from kproxy_iptables.kernel import Processes, find_variant
from kproxy_iptables.variant import prefers_nft
from tests.plugins.iptables.rig import LEGACY, NFT, V4, V6, run

HINT = ":KUBE-IPTABLES-HINT - [0:0]\n"
OLD_HINT = ":KUBE-KUBELET-CANARY - [0:0]\n"
RULE = "-A INPUT -j ACCEPT\n"

NOTHING: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("nft", "legacy", "default_is_nft", "expected"),
    [
        ((HINT,), NOTHING, False, True),
        ((OLD_HINT,), NOTHING, False, True),
        (NOTHING, (HINT,), True, False),
        (NOTHING, (OLD_HINT,), True, False),
        ((HINT,), (HINT,), False, True),
        ((HINT,), (RULE, RULE), False, True),
        ((RULE, RULE, RULE), (HINT,), True, False),
        ((RULE,), (RULE, RULE), True, False),
        ((RULE, RULE), (RULE,), False, True),
        ((RULE,), (RULE,), False, True),
        (NOTHING, NOTHING, True, True),
        (NOTHING, NOTHING, False, False),
    ],
)
def test_evidence(
    nft: tuple[str, ...], legacy: tuple[str, ...], default_is_nft: bool, expected: bool
) -> None:
    def save(kind: str, table: str) -> Iterator[str]:
        assert table == "" or kind == "nft", "naming a legacy table would create it"
        yield from nft if kind == "nft" else legacy

    assert prefers_nft(save, default_is_nft) is expected


@pytest.mark.parametrize(("interface", "other"), [(NFT, LEGACY), (LEGACY, NFT)])
def test_the_one_that_kubelet_uses_is_chosen(netns: None, interface: str, other: str) -> None:
    run(other, "-t", "filter", "-A", "INPUT", "-j", "ACCEPT", family=V6)
    run(interface, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    assert find_variant(Processes()).nft is (interface == NFT)


def test_looking_creates_nothing(netns: None) -> None:
    find_variant(Processes())
    assert kproxy_detect(settings=BackendSettings((V4, V6))).usable
    listed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_detection_names_what_was_found(netns: None) -> None:
    detection = kproxy_detect(settings=BackendSettings((V4,)))
    assert detection.usable
    assert detection.because.startswith("iptables 1.")
    assert detection.because.endswith("nat table for IPv4 present")


def test_detection_without_iptables_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PATH", "/nowhere")
    detection = kproxy_detect(settings=BackendSettings((V4,)))
    assert not detection.usable
    assert detection.because == "iptables: iptables is not installed. install iptables 1.8 or newer"
