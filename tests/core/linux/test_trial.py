"""Questions answered by a fork of the process, in a network namespace that ends with it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kproxy_core.linux.trial import TrialFailed, TrialNamespace, run_in_child
from tests.core.other_user import NOBODY, as_nobody


def namespace_id() -> str:
    return os.readlink("/proc/self/ns/net")


def test_a_trial_does_not_affect_the_node() -> None:
    def question(namespace: TrialNamespace) -> tuple[str, int, list[str], str]:
        problem = namespace.enter()
        subprocess.run(["ip", "link", "add", "kpt-trial", "type", "veth"], check=True)
        return problem, os.getpid(), [name for _, name in socket.if_nameindex()], namespace_id()

    problem, pid, interfaces, where = run_in_child(question)
    assert problem == ""
    assert pid != os.getpid()
    assert "kpt-trial" in interfaces
    assert where != namespace_id()
    assert "kpt-trial" not in [name for _, name in socket.if_nameindex()]


def test_before_it_enters_a_namespace_the_fork_sees_the_node() -> None:
    assert run_in_child(lambda _: namespace_id()) == namespace_id()


def test_a_big_answer_arrives() -> None:
    assert run_in_child(lambda _: b"x" * 3_000_000) == b"x" * 3_000_000


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGTERM), "ended by signal 15"),
        (lambda _: os._exit(3), "ended with status 3"),
        (lambda _: 1 / 0, "ended with status 1"),
    ],
    ids=["crash", "exit", "error"],
)
def test_a_fork_that_crashes_gives_no_answer(how: object, told: str) -> None:
    with pytest.raises(TrialFailed, match=told):
        run_in_child(how)  # type: ignore[arg-type]


def test_a_fork_that_hangs_is_killed() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text().split()
    with pytest.raises(TrialFailed, match=r"no answer within 0\.1 s"):
        run_in_child(lambda _: time.sleep(600), timeout=0.1)
    assert set(children.read_text().split()) <= set(before)


def unprivileged(code: str) -> str:
    """Return the output of a program that asks questions without privileges."""
    imports = (
        "import os, subprocess\n"
        "from kproxy_core.linux import programs\n"
        "from kproxy_core.linux.trial import run_in_child\n"
    )
    return subprocess.run(
        as_nobody(sys.executable, "-c", f"{imports}{code}"),
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_an_unprivileged_user_gets_a_user_namespace() -> None:
    code = (
        "def question(namespace):\n"
        "    return namespace.enter(), subprocess.run(['nft', 'add table ip kpt-trial']).returncode\n"
        "print(os.geteuid(), run_in_child(question))"
    )
    assert unprivileged(code) == f"{NOBODY} ('', 0)\n"


def test_a_user_namespace_can_be_entered_right_after_programs_were_run() -> None:
    """A thread that is still ending would prevent it."""
    code = (
        "def question(namespace):\n"
        "    return list(programs.lines('true')), namespace.enter()\n"
        "print(*{run_in_child(question)[1] for _ in range(50)}, sep=' or ')"
    )
    assert unprivileged(code) == "\n"
