"""Detection on a kernel without IPVS. The guest has tests for one with IPVS."""

import pytest

from kproxy_core.contract.errors import InvalidOption, Unsupported
from kproxy_core.contract.values import BackendSettings, Detection
from kproxy_core.linux import programs, trial
from kproxy_core.model.address import Family
from kproxy_ipvs.backend import IpvsBackend
from kproxy_ipvs.detect import detect

BOTH = BackendSettings(tuple(Family), options={"scheduler": "none"})


@pytest.fixture(autouse=True)
def _a_scheduler_that_no_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_ipvs.settings.SCHEDULERS", ("rr", "wrr", "none"))


def tried(settings: BackendSettings = BOTH) -> Detection:
    """Detect as ``kproxy modes --probe`` does."""
    return trial.run_in_child(lambda namespace: detect(settings, namespace, load_modules=False))


def test_unknown_scheduler_is_refused() -> None:
    with pytest.raises(InvalidOption, match="scheduler: 'fastest': must be one of rr, wrr"):
        detect(BackendSettings((Family.IPV4,), options={"scheduler": "fastest"}), None, load_modules=False)


def test_only_refused_features_are_missing(netns: None) -> None:
    found = {requirement.what: requirement for requirement in tried().requirements}
    servers = found["IPv4: virtual server with scheduler none"]
    assert not servers.met
    assert "use a kernel with CONFIG_IP_VS_NONE" in servers.remedy
    for what in ("IPv4: set of type hash:ip,port,net", "IPv6: set match", "IPv6: nat table"):
        assert found[what].met, found[what]
    assert programs.output("ipset", "list", "-name") == ""


def test_backend_start_names_missing_requirements(netns: None) -> None:
    with pytest.raises(Unsupported, match=r"no virtual servers for IPv4: .*CONFIG_IP_VS_NONE"):
        IpvsBackend(BOTH).begin()


@pytest.mark.parametrize("program", ["ipset", "iptables"])
def test_missing_program_is_named_with_its_package(
    netns: None, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = programs.find
    monkeypatch.setattr(programs, "find", lambda name: None if name.startswith(program) else real(name))
    assert f"install {program} " in tried().because
