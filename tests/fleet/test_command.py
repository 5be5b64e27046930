"""The console script: its help, a terminal, and what it says without its packages."""

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy_core import __version__
from kproxy_core.cli.kubectl import COMMANDS
from tests.core.api_servers import CHECKOUT
from tests.fleet.canned import STATUS, Canned
from tests.fleet.fleet import KUBECTL_KPROXY


def test_help_is_printed_without_heavy_imports() -> None:
    asked = ("import sys; from kproxy_core.cli.kubectl import main; sys.argv[1:] = ['--help']\n"
             "try: main()\nexcept SystemExit: print(*sys.modules)")
    output = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert output.startswith("Usage: ")
    *_, modules = output.splitlines()
    assert not {"kubernetes", "msgspec", "rich", "kproxy_core.cli.kubectl.status"} & set(modules.split())


def test_it_tells_its_version() -> None:
    done = subprocess.run([KUBECTL_KPROXY, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kproxy {__version__}\n"


def test_the_page_has_every_command() -> None:
    page = (CHECKOUT / "docs" / "fleet.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == set(COMMANDS)


def test_on_a_terminal_a_bar_shows_the_progress_and_problems_are_red(canned: Canned) -> None:
    canned.answer("good", STATUS)
    canned.answer("bad", {**STATUS, "well": False, "problems": ["[red]busy"]})
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
            [KUBECTL_KPROXY, "status", "--kubeconfig", canned.kubeconfig], stdout=theirs, stderr=theirs,
            env={**environment, "TERM": "xterm", "COLUMNS": "160"}) as process:
        os.close(theirs)
        text = b""
        with suppress(OSError):  # EIO: the command has ended.
            while data := os.read(ours, 65536):
                text += data
    os.close(ours)
    assert process.returncode == 1
    assert b"/2" in text  # of the bar
    lines = text.splitlines()
    (row,) = (line for line in lines if b"[red]busy" in line)
    assert b"\x1b[31m" in row
    assert b"1 of 2 nodes are well" in lines[-1]


def test_ctrl_c_gives_up_what_is_under_way(canned: Canned, tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    for number in range(3):
        canned.node(f"node-{number}", f"echo > {started}; exec sleep 1000")
    with subprocess.Popen(
            ["env", "--default-signal=INT",  # a shell has its background jobs ignore it, the tests too
             KUBECTL_KPROXY, "status", "--kubeconfig", canned.kubeconfig], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True) as process:
        with started.open() as file:  # which ends when no node has it open any longer
            assert file.read() != ""
        process.send_signal(signal.SIGINT)
        output, error = process.communicate()
    assert (process.returncode, output, error.strip()) == (1, "", "")


def test_a_missing_package_is_named(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kproxy_core.fleet.cluster", raising=False)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert str(canned.kubectl("status").exception) == (
        f"kubectl kproxy needs the package kubernetes: pip install 'kproxy[api]=={__version__}'")
