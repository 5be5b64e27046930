"""The presence of kernel modules, and the remedies for missing ones."""

import gzip
from pathlib import Path

import pytest

from kproxy_core.linux.modules import Modules, Presence

RELEASE = "6.1.0-test"
DIRECTORY = f"lib/modules/{RELEASE}"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def modules(root: Path, **options: str) -> Modules:
    return Modules(options, root=root, release=RELEASE)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine whose kernel supports modules and has none."""
    write(tmp_path, "proc/modules", "")
    write(tmp_path, f"{DIRECTORY}/modules.dep", "")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "presence"),
    [
        ("proc/modules", "ip_vs 180224 0 - Live 0x0\n", Presence.LOADED),
        ("sys/module/ip_vs/version", "1.2.1\n", Presence.LOADED),
        (f"{DIRECTORY}/modules.builtin", "kernel/net/netfilter/ipvs/ip_vs.ko\n", Presence.BUILT_IN),
        (f"boot/config-{RELEASE}", "CONFIG_IP_VS=y\n", Presence.BUILT_IN),
        (f"{DIRECTORY}/modules.dep", "kernel/net/ipvs/ip_vs.ko.xz: kernel/a/b.ko.xz\n", Presence.LOADABLE),
        (f"{DIRECTORY}/modules.dep", "kernel/net/ipvs/ip-vs.ko.zst:\n", Presence.LOADABLE),
        (f"{DIRECTORY}/modules.dep", "kernel/net/ipvs/ip_vs_rr.ko: kernel/net/ip_vs.ko\n", Presence.ABSENT),
        ("proc/modules", "ip_vs_rr 16384 0 - Live 0x0\n", Presence.ABSENT),
        (f"boot/config-{RELEASE}", "# CONFIG_IP_VS is not set\n", Presence.ABSENT),
    ],
)
def test_the_presence_of_a_module(file: str, text: str, presence: Presence, machine: Path) -> None:
    write(machine, file, text)
    assert modules(machine).presence("ip_vs") is presence


def test_the_configuration_in_proc_and_options_with_other_names(machine: Path) -> None:
    with gzip.open(machine / "proc/config.gz", "wt") as file:
        file.write("CONFIG_NETFILTER_XT_SET=y\nCONFIG_IP_VS_MH=y\n")
    found = modules(machine, xt_set="CONFIG_NETFILTER_XT_SET")
    assert found.presence("ip_vs_mh") is Presence.BUILT_IN
    assert found.presence("xt_set") is Presence.BUILT_IN


def test_without_the_module_directory_the_configuration_decides(tmp_path: Path) -> None:
    write(tmp_path, "proc/modules", "")
    write(tmp_path, f"boot/config-{RELEASE}", "CONFIG_IP_VS=m\n# CONFIG_DUMMY is not set\n")
    found = modules(tmp_path)
    assert [found.presence(name) for name in ("ip_vs", "dummy", "other")] == [
        Presence.LOADABLE, Presence.ABSENT, Presence.UNKNOWN,
    ]  # fmt: skip


def test_only_a_loadable_module_may_be_loaded(machine: Path) -> None:
    write(machine, "proc/modules", "ip_vs 180224 0 - Live 0x0\n")
    write(machine, f"{DIRECTORY}/modules.dep", "a/ip_vs.ko:\na/dummy.ko:\n")
    assert modules(machine).not_loaded(["ip_vs", "dummy", "absent"]) == ["dummy"]


def test_an_unknown_module_may_be_loaded(tmp_path: Path) -> None:
    write(tmp_path, "proc/modules", "")
    assert modules(tmp_path).not_loaded(["dummy"]) == ["dummy"]


@pytest.mark.parametrize("file", ["", "proc/sys/kernel/modules_disabled"])
def test_without_loadable_modules_nothing_may_be_loaded(file: str, tmp_path: Path) -> None:
    if file:
        write(tmp_path, file, "1\n")
        write(tmp_path, "proc/modules", "")
    found = modules(tmp_path)
    assert found.fixed
    assert found.not_loaded(["ip_vs", "dummy"]) == []


def test_a_missing_module_has_a_remedy(machine: Path) -> None:
    assert modules(machine).remedy("ip_vs_sh") == "modprobe ip_vs_sh, or use a kernel with CONFIG_IP_VS_SH"


def test_the_remedy_mentions_a_module_directory_missing_in_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/modules", "")
    assert "mount the node's /lib/modules" in modules(tmp_path).remedy("ip_vs")
