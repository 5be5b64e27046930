"""The two commands where people try software first: in a container, as nobody, in a user namespace."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kproxy_conformance.processes import own_name
from tests.core.other_user import NOBODY, as_nobody
from tests.environments import container
from tests.examples.pages import expect_outputs

CHECKOUT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
PACKETS = "tests/core/linux/test_resets.py"
"""Tests that send packets through rules of nf_tables."""


def as_root_of_a_user_namespace(*command: str) -> list[str]:
    return as_nobody("unshare", "--user", "--net", "--mount", "--map-root-user", *command)


def run(command: Sequence[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run *command* as on a machine that is not CI's, with *variables* of the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | variables
    return subprocess.run(command, cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, check=False)  # fmt: skip


def test_the_demo_shows_relays_in_a_container_and_says_what_the_rest_needs() -> None:
    done = run(container.command([sys.executable, "-m", "examples.demo"]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16 checks passed" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "For the whole demo:" in line]
    assert "CAP_SYS_ADMIN and CAP_NET_ADMIN, or unshare -Urnm make demo" in line


def test_the_whole_demo_works_without_root_in_a_user_namespace() -> None:
    done = run(as_root_of_a_user_namespace(sys.executable, "-m", "examples.demo"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 of 28 checks passed" in done.stdout


def test_the_quick_start_works_without_root_in_a_user_namespace() -> None:
    """With what the page promises there: a change of modes, and the clean-up."""
    with tempfile.TemporaryDirectory(prefix=f"{own_name('page')}-") as directory:
        os.chown(directory, NOBODY, NOBODY)
        expect_outputs(
            CHECKOUT / "docs" / "quickstart.md", Path(directory, "hello"), at_least=8,
            sandbox=lambda *command: as_nobody(*command[:1], "--user", "--map-root-user", *command[1:]))


def test_packets_are_sent_without_root_in_a_user_namespace() -> None:
    done = run(as_root_of_a_user_namespace(*PYTEST, PACKETS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("who", ["container", "nobody"])
def test_what_the_machine_refuses_is_left_out_and_named(who: str) -> None:
    command = (*PYTEST, PACKETS)
    done = run(container.command([*command]) if who == "container" else as_nobody(*command))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+ skipped in", done.stdout), done.stdout
    assert "needs network namespaces: Operation not permitted" in done.stdout


WITHOUT_IPSET = """
mount -t tmpfs tmpfs "$0"
mkdir "$0/changes" "$0/work"
sbin=$(dirname "$(command -v ipset)")
mount -t overlay -o "lowerdir=$sbin,upperdir=$0/changes,workdir=$0/work" overlay "$sbin"
rm "$sbin/ipset"
exec "$@"
"""


@pytest.mark.parametrize(("variables", "tally", "reason"), [
    ({}, "2 passed, 1 skipped", "needs the program ipset: not installed"),
    ({"CI": "true"}, "1 failed, 2 passed", 'exec of "ipset" failed'),
])  # fmt: skip
def test_without_a_program_only_what_needs_it_is_left_out(
    variables: dict[str, str], tally: str, reason: str, tmp_path: Path
) -> None:
    """As where apt has no network."""
    tests = ("tests/leftovers/test_cleanup.py::test_own_only_removes_what_only_kproxy_creates",
             f"{PACKETS}::test_messages_and_text_make_the_same_table")
    done = run(["unshare", "--mount", "--propagation=private", "sh", "-euc", WITHOUT_IPSET, str(tmp_path),
                *PYTEST, "-rs", *tests], **variables)
    assert re.search(rf"^{tally} in", done.stdout, re.MULTILINE), done.stdout
    assert reason in done.stdout


def test_in_ci_it_fails() -> None:
    done = run(container.command([*PYTEST, PACKETS]), CI="true")
    assert done.returncode == 1
    assert "MissingRight" in done.stdout


def test_lanes_count_what_each_missing_right_costs() -> None:
    done = run(container.command([sys.executable, "-m", "tests.lanes", "test", "shortage"]))
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    found = re.fullmatch(r"(\d+) passed, 0 failed, (\d+) skipped", last)
    assert found, done.stdout
    assert f"{found[2]} tests left out: network namespaces: Operation not permitted" in done.stdout


KPROXY = str(Path(sys.executable).with_name("kproxy"))
WITHOUT_RIGHTS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "container": container.command,
    "nobody": lambda command: as_nobody(*command),
    "only a user namespace": lambda command: ["unshare", "-Ur", *command],
}  # fmt: skip


@pytest.mark.parametrize("who", WITHOUT_RIGHTS)
def test_without_rights_a_probe_promises_nothing_that_a_start_refuses(who: str, tmp_path: Path) -> None:
    probed = run(WITHOUT_RIGHTS[who]([KPROXY, "modes", "--probe"]))
    assert probed.returncode == 1
    first, *others = probed.stdout.splitlines()
    assert first == "a proxy started like this would not serve: no mode that it may use works here"
    assert any("--userspace-listen ADDRESS" in line for line in others)
    assert len(others) == 10, probed.stdout
    started = run(WITHOUT_RIGHTS[who]([KPROXY, f"--manifests={tmp_path}"]))
    assert started.returncode == 1
    *reasons, last = started.stderr.splitlines()
    assert last.endswith(
        "no mode works on this machine; the lines above say why, and so does kproxy modes --probe")
    assert len([line for line in reasons if "mode does not work here" in line]) == 5


@pytest.mark.parametrize("who", WITHOUT_RIGHTS)
def test_without_rights_a_cleanup_is_one_error(who: str) -> None:
    done = run(WITHOUT_RIGHTS[who]([KPROXY, "--cleanup"]))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: permission denied, run as root or with CAP_NET_ADMIN\n"


def test_a_cleanup_says_once_what_several_modes_cannot_read() -> None:
    done = run(as_root_of_a_user_namespace(KPROXY, "--cleanup"))
    *errors, last = done.stderr.splitlines()
    assert last == "Error: not everything could be removed"
    assert [error.partition(": exit 1: ")[0] for error in errors] == [
        f"iptables: {program}: {program}-save" for program in ("iptables-legacy", "ip6tables-legacy")]


def test_in_a_user_namespace_with_a_network_a_probe_finds_a_mode() -> None:
    probed = run(as_root_of_a_user_namespace(KPROXY, "modes", "--probe"))
    assert probed.returncode == 0
    assert probed.stdout.startswith("a proxy started like this would serve in mode nftables\n")
    assert "ebpf         not usable  bpf(2): Operation not permitted\n" in probed.stdout
