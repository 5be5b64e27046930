"""Where modules are looked for, and what an operator is told about those that are missing."""

import gzip
from pathlib import Path

import pytest

from kproxy_core.backend.api import BackendSettings
from kproxy_core.model.address import Family
from kproxy_ipvs.detect import ModuleSearch, detect

RELEASE = "6.1.0-test"


def never(module: str) -> bool:
    """A modprobe that knows no module."""
    del module
    return False


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def search(root: Path) -> ModuleSearch:
    return ModuleSearch(root, RELEASE, never)


@pytest.mark.parametrize(
    ("file", "text", "where"),
    [
        ("proc/modules", "ip_vs 180224 0 - Live 0x0\n", "loaded"),
        ("sys/module/ip_vs/version", "1.2.1\n", "loaded"),
        (f"lib/modules/{RELEASE}/modules.builtin", "kernel/net/netfilter/ipvs/ip_vs.ko\n", "built in"),
        (f"boot/config-{RELEASE}", "CONFIG_IP_VS=y\n", "built in"),
        (f"boot/config-{RELEASE}", "CONFIG_IP_VS=m\n", ""),
        ("proc/modules", "ip_vs_rr 16384 0 - Live 0x0\n", ""),
    ],
)
def test_where_a_module_is_found(file: str, text: str, where: str, tmp_path: Path) -> None:
    write(tmp_path, file, text)
    assert search(tmp_path).where("ip_vs") == where


def test_configuration_may_be_in_proc(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    with gzip.open(tmp_path / "proc/config.gz", "wt") as file:
        file.write("CONFIG_IP_VS_MH=y\n")
    assert search(tmp_path).where("ip_vs_mh") == "built in"


def test_module_that_modprobe_knows_is_there(tmp_path: Path) -> None:
    found = ModuleSearch(tmp_path, RELEASE, lambda module: module == "ip_vs")
    assert found.where("ip_vs") == "loadable"
    assert found.where("ip_vs_rr") == ""


def test_missing_module_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / f"lib/modules/{RELEASE}").mkdir(parents=True)
    missing = search(tmp_path).requirement("ip_vs_sh")
    assert not missing.met
    assert RELEASE in missing.found
    assert missing.remedy == "modprobe ip_vs_sh, or use a kernel with CONFIG_IP_VS_SH"


def test_container_without_modules_is_told_so(tmp_path: Path) -> None:
    assert "mount the node's /lib/modules" in search(tmp_path).requirement("ip_vs").remedy


def test_unknown_scheduler_is_refused() -> None:
    found = detect(BackendSettings((Family.IPV4,), options={"scheduler": "fastest"}))
    assert not found.usable
    assert "'fastest' is none of rr, wrr" in found.because


def test_every_requirement_is_looked_at() -> None:
    found = detect(BackendSettings((Family.IPV4,), options={"scheduler": "wlc"}))
    assert [requirement.what for requirement in found.requirements] == [
        "module ip_vs", "module ip_vs_wlc", "module nf_conntrack", "module ip_set", "module xt_set",
        "module dummy", "ipset", "iptables",
    ]  # fmt: skip
    assert all(requirement.met or requirement.remedy for requirement in found.requirements)
