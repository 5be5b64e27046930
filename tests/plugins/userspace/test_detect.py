"""Requirements of the mode on this machine."""

import errno
import os
import subprocess
from unittest.mock import Mock

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.errors import InvalidOption
from kproxy_core.contract.values import BackendSettings, Detection
from kproxy_core.linux import programs, trial
from kproxy_core.model.address import Family
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_userspace.backend import UserspaceBackend
from kproxy_userspace.detect import detect

BOTH = BackendSettings(tuple(Family))


def tried(settings: BackendSettings = BOTH) -> Detection:
    """Detect as ``kproxy modes --probe`` does."""
    return trial.run_in_child(lambda namespace: detect(settings, namespace, load_modules=False))


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide programs whose names begin with one of *names*; ``""``: all."""
    real = programs.find
    monkeypatch.setattr(programs, "find", lambda name: None if name.startswith(names) else real(name))


def test_redirection_is_tried_with_iptables(netns: None) -> None:
    found = tried()
    assert found.usable, found.because
    assert {"IPv4: REDIRECT", "IPv6: physdev match"} <= {r.what for r in found.requirements if not r.guessed}


def test_without_iptables_it_is_tried_over_netlink(netns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "")
    found = tried()
    assert found.usable, found.because
    names = [requirement.what for requirement in found.requirements]
    assert names[1:] == ["IPv4: redirection by nf_tables", "IPv6: redirection by nf_tables"]
    listed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    assert listed.stdout == ""


def test_rendered_portals_are_checked_where_nft_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    of = service("web", "80@30080", load_balancer_ips="203.0.113.1", source_ranges="198.51.100.0/24")
    node = node_view(anywhere=True)
    update = full_update(node, plans(node, of, endpoint_slice("web", "10.0.0.1")))
    with_iptables = UserspaceBackend(BOTH).check_text(update)
    hide(monkeypatch, "iptables")
    backend = UserspaceBackend(BOTH)
    assert "198.51.100.0/24 . 203.0.113.1 . tcp . 80" in backend.render(update)
    assert (with_iptables, backend.check_text(update)) == (None, "")


def test_without_iptables_and_nf_tables_there_is_still_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "")
    absent = OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    monkeypatch.setattr(NetlinkSocket, "open", Mock(side_effect=absent))
    found = tried()
    assert found.refuted
    assert "Protocol not supported" in found.because
    assert "or serve without portals: --userspace-listen ADDRESS" in found.because


def test_without_portals_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "iptables", "nft")
    found = detect(BackendSettings((Family.IPV4,), options={"listen": "127.0.0.1"}), None, load_modules=False)
    assert found.usable
    assert found.because == "ports at 127.0.0.1, no portals"


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(InvalidOption, match="listen: 'nowhere'"):
        detect(BackendSettings((Family.IPV4,), options={"listen": "nowhere"}), None, load_modules=False)
