"""What the plugin says about this machine."""

import subprocess

import pytest

from kproxy_core.backend.api import BackendSettings
from kproxy_core.host import programs
from kproxy_iptables.hooks import kproxy_detect
from tests.plugins.iptables.rig import V4, V6


def test_looking_creates_nothing(netns: None) -> None:
    assert kproxy_detect(settings=BackendSettings((V4, V6))).usable
    listed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_detection_names_what_was_found(netns: None) -> None:
    detection = kproxy_detect(settings=BackendSettings((V4,)))
    assert detection.usable
    assert detection.because.startswith("iptables 1.")
    assert detection.because.endswith("nat table for IPv4 present")


def test_detection_without_iptables_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PATH", "/nowhere")
    detection = kproxy_detect(settings=BackendSettings((V4,)))
    assert not detection.usable
    assert detection.because == "iptables: iptables is not installed. install iptables 1.8 or newer"
