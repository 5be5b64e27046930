"""Every command of docs/quickstart.md runs, in the order of the page, and prints what the page promises."""

import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "quickstart.md"

SANDBOX = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc"]
PRIVATE_DIRECTORY = "mount -t tmpfs none /run\n"
LONGEST = 120
"""Seconds; the page takes a few."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the whole page prints, standard output only."""
    commands = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    # The environment is there already, and its own commands are not the page's subject.
    script = "".join(block for block in commands if block != "make env\n")
    script = script.replace("/tmp/hello", str(tmp_path_factory.mktemp("quickstart") / "hello"))
    ran = subprocess.run(
        [*SANDBOX, PRIVATE_DIRECTORY + script],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LONGEST,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_modes_are_listed(printed: str) -> None:
    assert re.search(r"^nftables\b", printed, re.MULTILINE)


def test_service_answers_each_time(printed: str) -> None:
    """ClusterIP, node port, after the change, after the damage, after the end of kproxy."""
    assert printed.count("hello from the pod") == 5


def test_process_reports(printed: str) -> None:
    assert '"healthy":true' in printed
    assert "kubeproxy_sync_proxy_rules_duration_seconds_count" in printed
