"""Every command of docs/modes.md runs, in the order of the page, and prints what the page promises."""

import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "modes.md"

SANDBOX = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc"]
PRIVATE_DIRECTORY = "mount -t tmpfs none /run\n"
LONGEST = 120
"""Seconds; the page takes a few."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the whole page prints, standard output only."""
    commands = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    script = "".join(commands).replace("/tmp/modes", str(tmp_path_factory.mktemp("modes")))
    ran = subprocess.run(
        [*SANDBOX, PRIVATE_DIRECTORY + script],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LONGEST,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def test_modes_that_work_are_told_to_people_and_scripts(printed: str) -> None:
    assert re.search(r"^  ok       ip: reject: works", printed, re.MULTILINE)
    assert "nftables works\n" in printed
    assert re.search(r"^nftables iptables\b.* userspace$", printed, re.MULTILINE)


def test_the_mode_that_serves_is_told(printed: str) -> None:
    assert re.search(r"\r\n\r\nnftables", printed) or "\n\nnftables" in printed


def test_cleaning_up_says_what_it_removes(printed: str) -> None:
    (would,) = re.findall(r"^nftables: table ip kproxy would be removed$", printed, re.MULTILINE)
    assert would.replace(" would be", "") in printed.splitlines()


def test_what_the_page_quotes_is_what_kproxy_says() -> None:
    said = {
        "another mode serves than the one asked for": "kproxy_core/cli/choice.py",
        "ModeFallback": "kproxy_core/cli/process.py",
        "kproxy_mode_fallback": "kproxy_core/run/metrics.py",
        "Kproxy-Mode-Fallback-Reason": "kproxy_core/run/routes.py",
    }
    page = PAGE.read_text()
    for words, module in said.items():
        assert words in page
        assert words in (CHECKOUT / module).read_text()
