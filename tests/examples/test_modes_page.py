"""Every command of docs/modes.md runs, in the order of the page, and prints what the page promises."""

import re

import pytest

from tests.examples.pages import CHECKOUT, printed_by

PAGE = CHECKOUT / "docs" / "modes.md"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The standard output of the whole page."""
    return printed_by(PAGE, tmp_path_factory.mktemp("page"))


def test_modes_that_work_are_told_to_people_and_scripts(printed: str) -> None:
    assert "a proxy started like this would serve in mode nftables\nnftables     usable\n" in printed
    assert "nftables works\n" in printed
    assert re.search(r"^nftables iptables\b.* userspace$", printed, re.MULTILINE)


def test_the_mode_that_serves_is_told(printed: str) -> None:
    assert re.search(r"\r\n\r\nnftables", printed) or "\n\nnftables" in printed


def test_the_mode_is_switched_there_and_back(printed: str) -> None:
    lines = printed.splitlines()
    assert lines.index("iptables serves") < lines.index("nftables is removed")
    assert lines.index("nftables is removed") < lines.index("nftables serves")
    assert lines.index("nftables serves") < lines.index("iptables is removed")


def test_cleaning_up_says_what_it_removes(printed: str) -> None:
    (would,) = re.findall(r"^nftables: table ip kproxy would be removed$", printed, re.MULTILINE)
    assert would.replace(" would be", "") in printed.splitlines()


def test_what_the_page_quotes_is_what_kproxy_says() -> None:
    said = {
        "falling back to another mode": "kproxy_core/modes/choice.py",
        "ModeFallback": "kproxy_core/app/assembly.py",
        "kproxy_mode_fallback": "kproxy_core/observe/metrics.py",
        "Kproxy-Mode-Fallback-Reason": "kproxy_core/observe/pages.py",
    }
    page = PAGE.read_text()
    for words, module in said.items():
        assert words in page
        assert words in (CHECKOUT / module).read_text()
