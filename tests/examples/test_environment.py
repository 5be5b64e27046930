"""``make env`` installs what is missing, or prints the command that does, with the distribution's names.

Then it builds the virtual environment, and says each step.
"""

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
INSTALL, AT_ONCE = "apt-get install -y --no-install-recommends", "-o Acquire::Retries::Delay=false"
RECORDING = '#!/bin/sh\necho "$0 $*" >> "$0.calls"\n'
INSTALLING = """
for package; do
    case $package in
    iptables) names='iptables-nft iptables-legacy' ;;
    ipset | curl | nftables) names=${package%ables} ;;
    *) names='' ;;
    esac
    for name in $names; do echo '#!/bin/sh' > "${0%/*}/$name"; /bin/chmod +x "${0%/*}/$name"; done
done
"""
APT = {"apt-get": RECORDING + INSTALLING}
FORGETFUL = f"""{RECORDING}
case $1 in update) : > $0.updated ;; esac
test -e $0.updated || exit 100
{INSTALLING}"""
"""apt-get with no lists of packages yet."""
WITHOUT_IPSET = f"""{RECORDING}
case $* in *ipset*) echo 'E: Unable to locate package ipset'; exit 100 ;; esac
{INSTALLING}"""
UNREACHABLE = """#!/bin/sh
echo "$0 $*" >> "$0.calls"
case $* in update* | *--simulate) exit 0 ;; esac
echo 'E: Failed to fetch curl.deb  Temporary failure resolving deb.example'
exit 100
"""
"""apt-get whose lists of packages are old ones, which do for ``update``, without a network."""
OFFLINE = "#!/bin/sh\n[ $1 = update ] && echo \"E: Could not resolve 'deb.example'\" >&2\nexit 100\n"


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
    assert done.stderr == f"make env: missing: nft bcc nftables; the rest works. {expected}\n"


@pytest.mark.parametrize("uid", [0, 1000])
def test_without_a_python_that_makes_environments_nothing_goes_on(tmp_path: Path, uid: int) -> None:
    refusing = {"apt-get": "#!/bin/sh\nexit 100\n"}
    done = check(machine(tmp_path, absent="ensurepip", uid=uid, others=refusing))
    assert done.returncode == 1
    assert "As root: apt-get install -y --no-install-recommends python3-venv" in done.stderr


def test_packages_that_cannot_be_installed_are_named(tmp_path: Path) -> None:
    """As in a container without a network: with what apt says, and its command."""
    done = check(machine(tmp_path, without=["ipset"], uid=0, others={"apt-get": OFFLINE}))
    assert done.returncode == 0
    assert done.stdout == "installing ipset\nupdating apt's lists of packages\n"
    assert done.stderr.splitlines() == [
        "E: Could not resolve 'deb.example'",
        f"failed: apt-get update -qq {AT_ONCE}",
        "make env: missing: ipset; the rest works. As root: apt-get install -y --no-install-recommends ipset",
    ]


def test_a_package_that_apt_does_not_have_keeps_no_other_out(tmp_path: Path) -> None:
    done = check(machine(tmp_path, without=["curl", "ipset"], uid=0, others={"apt-get": WITHOUT_IPSET}))
    assert done.returncode == 0
    assert (tmp_path / "curl").exists()
    assert done.stdout == "installing curl ipset\nupdating apt's lists of packages\ninstalling curl\n"
    assert done.stderr.splitlines() == [
        "E: Unable to locate package ipset",
        f"failed: {INSTALL} curl ipset {AT_ONCE}",
        "make env: missing: ipset; the rest works. As root: apt-get install -y --no-install-recommends ipset",
    ]


def test_without_a_network_no_package_is_tried_by_itself(tmp_path: Path) -> None:
    """With its lists, apt has them all: it could fetch none."""
    done = check(machine(tmp_path, without=["curl", "ipset"], uid=0, others={"apt-get": UNREACHABLE}))
    assert done.returncode == 0
    install = f"{INSTALL} curl ipset {AT_ONCE}"
    assert [call for call in calls(tmp_path) if "--simulate" not in call] == [
        install, f"apt-get update -qq {AT_ONCE}", install]
    assert done.stderr.splitlines() == [
        "E: Failed to fetch curl.deb  Temporary failure resolving deb.example",
        f"failed: {install}",
        f"make env: missing: curl ipset; the rest works. As root: {INSTALL} curl ipset",
    ]


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
    assert (done.returncode, done.stdout, done.stderr) == (0, "installing iptables\n", "")
    assert calls(tmp_path) == [f"{INSTALL} iptables {AT_ONCE}"]


def test_lists_of_packages_are_fetched_if_there_are_none(tmp_path: Path) -> None:
    done = check(machine(tmp_path, without=["ipset"], uid=0, others={"apt-get": FORGETFUL}))
    assert (done.returncode, done.stderr) == (0, "")
    install = f"{INSTALL} ipset {AT_ONCE}"
    assert calls(tmp_path) == [install, f"apt-get update -qq {AT_ONCE}", install]


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


# -- the virtual environment

VENV = Path(__file__).parents[1] / "venv"
FAKE_PYTHON = r"""#!/bin/sh
case "$*" in
--version) echo "Python 3.11.2" ;;
"-c pass") ;;
-c*) echo "$(dirname "$0")" ;;
"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
*"$FAILING"*) echo "Looking in indexes"; echo "ERROR: No matching distribution found" >&2; exit 1 ;;
esac
"""


def built(directory: Path, failing: str) -> "subprocess.CompletedProcess[str]":
    """Run the script in *directory*; pip fails when it is told to install *failing*."""
    python = directory / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "FAILING": failing}
    return subprocess.run(
        [VENV, ".venv", python], cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_each_step_of_building_the_environment_is_said(tmp_path: Path) -> None:
    done = built(tmp_path, failing="nothing")
    assert (done.returncode, done.stderr) == (0, "")
    *steps, last = done.stdout.splitlines()
    assert steps == [
        "make env: making .venv with Python 3.11.2",
        "make env: getting setuptools and wheel",
        "make env: getting the packages that kproxy needs",
        "make env: getting those that its tests need, a minute",
    ]
    assert last.startswith("make env: .venv is ready, after ")


def test_a_step_that_fails_is_shown_with_its_command_and_output(tmp_path: Path) -> None:
    done = built(tmp_path, failing=".[test]")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "make env: getting those that its tests need, a minute"
    *output, command = done.stderr.splitlines()
    assert output == ["Looking in indexes", "ERROR: No matching distribution found"]
    assert command.startswith("make env: failed: .venv/bin/python -m pip install ")
