"""``make env`` installs what is missing, or prints the command that does, with the distribution's names."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

CHECK = Path(__file__).parents[1] / "packages"
PROGRAMS = (
    "conntrack", "curl", "ip", "ipset", "iptables-nft", "iptables-legacy", "modprobe", "nft", "sysctl",
    "unshare",
)  # fmt: skip
PYTHON = "#!/bin/sh\ncase $2 in *version*) echo {old} ;; *) echo {absent} ;; esac\n"
RECORDING = '#!/bin/sh\necho "$0 $*" >> "$0.calls"\n'
APT = {"apt-get": RECORDING}
FORGETFUL = f"{RECORDING}case $1 in update) : > $0.updated ;; esac\ntest -e $0.updated\n"
"""apt-get with no lists of packages yet."""


def machine(
    directory: Path, *, without: Sequence[str] = (), absent: str = "", old: str = "", uid: int = 1000,
    others: Mapping[str, str] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """Fill *directory* with programs, except those in *without*.

    *absent* modules are missing in python3, *old* is its version if it is too old, *others* are added.
    """
    scripts = dict.fromkeys(PROGRAMS, "#!/bin/sh\n")
    scripts |= {"python3": PYTHON.format(absent=absent, old=old), "id": f"#!/bin/sh\necho {uid}\n"}
    scripts |= others
    for name, script in scripts.items():
        if name not in without:
            (directory / name).write_text(script)
            (directory / name).chmod(0o755)
    return directory


def check(path: Path, *of: str) -> "subprocess.CompletedProcess[str]":
    arguments = of or ("env", "python3")
    return subprocess.run(
        ["/bin/sh", CHECK, *arguments], env={"PATH": str(path)}, capture_output=True, text=True, check=False)


def calls(path: Path) -> list[str]:
    return [line.rpartition("/")[2] for line in (path / "apt-get.calls").read_text().splitlines()]


def test_nothing_is_said_or_installed_if_nothing_is_missing(tmp_path: Path) -> None:
    done = check(machine(tmp_path, uid=0, others=APT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "apt-get.calls").exists()


NAMES = "nftables python3-bpfcc python3-nftables"


@pytest.mark.parametrize(("manager", "expected"), [
    ("apt-get", f"As root: apt-get install -y --no-install-recommends {NAMES}"),
    ("dnf", "As root: dnf install -y nftables python3-bcc python3-nftables"),
    ("pacman", f"Debian has them in the packages {NAMES}; see docs/quickstart.md"),
])  # fmt: skip
def test_the_command_that_installs_what_is_missing_is_printed(
    tmp_path: Path, manager: str, expected: str
) -> None:
    done = check(machine(tmp_path, without=["nft"], absent="bcc nftables", others={manager: RECORDING}))
    assert done.returncode == 0, "what does not need them works"
    assert done.stderr == f"make env: missing: nft bcc nftables. {expected}\n"


@pytest.mark.parametrize("uid", [0, 1000])
def test_without_a_python_that_makes_environments_nothing_goes_on(tmp_path: Path, uid: int) -> None:
    refusing = {"apt-get": "#!/bin/sh\nexit 100\n"}
    done = check(machine(tmp_path, absent="ensurepip", uid=uid, others=refusing))
    assert done.returncode == 1
    assert "As root: apt-get install -y --no-install-recommends python3-venv" in done.stderr


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path) -> None:
    """As in a container without a network."""
    done = check(machine(tmp_path, without=["ipset"], uid=0, others={"apt-get": "#!/bin/sh\nexit 100\n"}))
    assert done.returncode == 0
    assert "missing: ipset. As root: apt-get install -y --no-install-recommends ipset" in done.stderr


def test_on_a_bare_fedora_every_package_has_its_name_there(tmp_path: Path) -> None:
    done = check(machine(tmp_path, without=[*PROGRAMS, "python3"], uid=0, others={"dnf": RECORDING}))
    assert done.returncode == 1
    assert done.stderr.partition("As root: ")[2].split() == [
        "dnf", "install", "-y", "conntrack-tools", "curl", "iproute", "ipset", "iptables-nft",
        "iptables-legacy", "kmod", "nftables", "procps-ng", "util-linux", "python3", "python3-bcc",
        "python3-nftables",
    ]  # fmt: skip


def test_root_on_debian_and_ubuntu_has_it_installed(tmp_path: Path) -> None:
    done = check(machine(tmp_path, without=["iptables-nft", "iptables-legacy"], uid=0, others=APT))
    assert (done.returncode, done.stdout) == (0, "installing iptables\n")
    assert calls(tmp_path) == ["apt-get install -y --no-install-recommends iptables"]


def test_lists_of_packages_are_fetched_if_there_are_none(tmp_path: Path) -> None:
    done = check(machine(tmp_path, without=["ipset"], uid=0, others={"apt-get": FORGETFUL}))
    assert done.returncode == 0
    install = "apt-get install -y --no-install-recommends ipset"
    assert calls(tmp_path) == [install, "apt-get update -qq", install]


def test_a_python_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    done = check(machine(tmp_path, old="3.10.12", uid=0, others=APT))
    assert done.returncode == 1
    assert done.stderr.startswith("make env: python3 is Python 3.10.12. 3.11 or newer is needed")


def test_only_debian_and_ubuntu_have_the_guest_kernel(tmp_path: Path) -> None:
    without = machine(tmp_path, others={"dnf": RECORDING})
    assert check(without, "guest").returncode == 0
    done = check(machine(tmp_path, others={"apt-get": RECORDING, "gcc": "", "make": ""}), "guest")
    assert done.returncode == 1
    assert "apt-get install -y --no-install-recommends bc bison kmod flex user-mode-linux" in done.stderr


def test_this_machine_has_everything() -> None:
    done = subprocess.run(
        [CHECK, "env", sys._base_executable], capture_output=True, text=True, check=False)  # type: ignore[attr-defined]
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
