"""The evidence of a failed scenario, where programs fail, too."""

import contextlib
import os

import pytest

from kproxy_conformance.network.namespaces import Namespace
from kproxy_conformance.suite import evidence
from tests.nft_releases.releases import BOOKWORM, TRIXIE


def test_a_program_that_crashes_leaves_its_status_instead_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BOOKWORM.programs}:{os.environ['PATH']}")
    with contextlib.closing(Namespace("node")) as node, node.entered():
        assert TRIXIE.run("add table ip foreign; add set ip foreign s { type ifname; }").returncode == 0
        found = evidence.ruleset(node)
    assert found.startswith("# nft list ruleset\nexit status -11\n\n# iptables-save\n")
