"""Every scenario in every mode and family it is meant for, against a kproxy process.

A case is one pytest case, played once; ``pytest tests/conformance -k hairpin`` plays only what it names.
"""

from collections.abc import Iterator

import pytest

from kproxy_core.testing.suite.scenario import find
from kproxy_core.testing.suite.stage import PASSED
from tests.conformance.cases import LEGACY, THROUGH_API, Case, cases_of, undocumented
from tests.conformance.stages import Stages

MODES = ("nftables", "nftables" + THROUGH_API, "iptables", "iptables" + LEGACY, "userspace", "ebpf")
SCENARIOS = {scenario.name: scenario for scenario in find()}

_SOURCE = "endpoints see the node, never the client"
_POLICY = "traffic policies are not for a mode that does not keep client addresses"
_PROCESS = "nothing is forwarded while the process does not run"
NOT_FOR: dict[str, dict[str, str]] = {
    "userspace": {
        "clusterip-from-outside": _SOURCE,
        "clusterip-udp": _SOURCE,
        "detect-local-by-bridge": _SOURCE,
        "detect-local-by-node-cidr": _SOURCE,
        "detect-local-by-prefix": _SOURCE,
        "hairpin": _SOURCE,
        "affinity-follows-policies": _POLICY,
        "affinity-local-policies": _POLICY,
        "both-policies-local": _POLICY,
        "internal-policy-local": _POLICY,
        "loadbalancer-local": _POLICY,
        "nodeport-etp-local": _POLICY,
        "nodeport-etp-local-none": _POLICY,
        "mode-switch": _PROCESS,
        "proxy-restart": _PROCESS,
    },
}
"""By mode, the scenarios that ask for what it does not do, and why; docs/userspace.md has them as a table."""


CASES = [case for mode in MODES for case in cases_of(mode, SCENARIOS.values(), NOT_FOR.get(mode, ()))]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("conformance"))
    yield made
    made.close()


def test_only_documented_cases_are_left_out() -> None:
    """A scenario is not played only where it says so itself, or where NOT_FOR does."""
    left_out = {name for names in NOT_FOR.values() for name in names}
    assert undocumented(CASES, SCENARIOS.values(), left_out - {case.scenario for case in CASES}) == []
    assert left_out <= set(SCENARIOS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scenario(case: Case, stages: Stages) -> None:
    result = stages.of(case.mode).play(SCENARIOS[case.scenario], case.kernel_mode, case.family)
    assert result.status == PASSED, result.detail
