"""The rules in the kernel equal those of kube-proxy 1.36, rule for rule."""

import pytest

from kproxy_core.model.address import Family
from kproxy_iptables.skeleton import BLOCK_LOCALNET
from tests.plugins.iptables import golden_cases
from tests.plugins.iptables.rig import INTERFACES, family_state, run

FRESH = "detect-local-by-node-cidr-ipv4"
"""Recorded before KUBE-FIREWALL existed, which is never deleted."""

KUBELETS_RULES = f"-A KUBE-FIREWALL {BLOCK_LOCALNET}\n"
KUBELET = """*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
{rules}COMMIT
"""
"""Existed when all other cases were recorded, as on a node with kubelet."""


def test_all_cases_exist() -> None:
    assert len(golden_cases.names()) == 68


@pytest.mark.usefixtures("netns")
@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("case", golden_cases.names())
def test_rules_equal_kube_proxys(case: str, interface: str) -> None:
    family = golden_cases.family(case)
    if case != FRESH:
        kubelet = KUBELET.format(rules=KUBELETS_RULES if family is Family.IPV4 else "")
        run(interface, "restore", "--noflush", family=family, stdin=kubelet)
    update = golden_cases.update(case)
    family_state(interface, family).resync(update.node, update.plans)
    held = run(interface, "save", family=family).splitlines()
    assert golden_cases.normalised(held) == golden_cases.kube_proxys_rules(case)
