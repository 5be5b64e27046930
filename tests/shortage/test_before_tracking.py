"""Starts on a kernel that has not loaded its connection tracking, and so has none of its settings."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.guest.guest import Guest

KPROXY = Path(sys.executable).with_name("kproxy")

_CONFIG = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: {mode}
conntrack: {{maxPerCore: 1, min: 300000, tcpCloseWaitTimeout: 77s}}
kproxy: {{stateDirectory: {directory}/state}}
"""
_SCRIPT = """
cd {directory}
mkdir manifests
ip link set lo up
! grep '^nf_conntrack ' /proc/modules
! cat /proc/sys/net/netfilter/nf_conntrack_max
{start}
cd /proc/sys/net/netfilter
cat nf_conntrack_max nf_conntrack_tcp_timeout_close_wait > {directory}/settings
"""
_COMMAND = f"{KPROXY} --config=config.yaml --manifests=manifests --hostname-override=node1 2> kproxy.log"
_SERVING = f"""
{_COMMAND} &
until curl -sf http://127.0.0.1:10256/healthz; do sleep 0.2; done
kill $!
wait $!
"""


def _play(mode: str, start: str, items: Sequence[pytest.Item], directory: Path) -> Path:
    """Run the commands *start* in a guest; return the directory with what they left."""
    (directory / "config.yaml").write_text(_CONFIG.format(mode=mode, directory=directory))
    script = _SCRIPT.format(directory=directory, start=start)
    with Guest(["sh", "-ec", script], directory / "guest.log", share=directory) as guest:
        assert guest.status() == 0, guest.output
    return directory


def _case(mode: str, start: str, name: str) -> ParameterSet:
    return pytest.param(id=name, marks=pytest.mark.in_a_guest(play=partial(_play, mode, start)))


@pytest.mark.parametrize((), [
    _case("nftables", _SERVING, "nftables, the process"),
    _case("iptables", f"{_COMMAND} --init-only", "iptables, its preparation"),
])
def test_limits_are_set_once_the_kernel_tracks_connections(from_guest: Path) -> None:
    assert (from_guest / "settings").read_text().split() == ["300000", "77"]
    log = (from_guest / "kproxy.log").read_text()
    assert "conntrack" not in log
    assert " ERROR " not in log
