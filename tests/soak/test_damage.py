"""The rules that a soak may damage: a proxy notices no damage to others."""

import pytest

from tests.soak.damage import is_ours

OF_SERVICE = "KUBE-SVC-AAAAAAAAAAAAAAAA"


@pytest.mark.parametrize(("mode", "table", "chain", "target", "ours"), [
    ("nftables", "kproxy", "services", "", True),
    ("iptables", "nat", OF_SERVICE, "", True),
    ("iptables", "nat", "OUTPUT", "KUBE-SERVICES", True),
    ("iptables", "nat", "OUTPUT", "DOCKER", False),
    ("iptables", "filter", "INPUT", "KUBE-FIREWALL", True),
    ("iptables", "filter", "KUBE-FIREWALL", "", True),
    ("userspace", "nat", "KUBE-PORTALS-HOST", "", True),
    ("userspace", "nat", "OUTPUT", "KUBE-PORTALS-HOST", True),
    ("userspace", "nat", "OUTPUT", "KUBE-SERVICES", False),
    ("userspace", "nat", OF_SERVICE, "", False),
])  # fmt: skip
def test_rules_of_the_mode_stand_in_its_chains_or_jump_to_them(
    mode: str, table: str, chain: str, target: str, ours: bool
) -> None:
    expr = [{"counter": None}, *([{"jump": {"target": target}}] if target else [])]
    assert is_ours(mode, {"family": "ip", "table": table, "chain": chain, "expr": expr}) is ours
