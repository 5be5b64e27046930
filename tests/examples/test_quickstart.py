"""Every command of docs/quickstart.md runs, in the order of the page, and prints what the page promises."""

import re

import pytest

from tests.examples.pages import CHECKOUT, printed_by

PAGE = CHECKOUT / "docs" / "quickstart.md"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The standard output of the whole page."""
    return printed_by(PAGE, tmp_path_factory.mktemp("page"))


def test_modes_are_listed(printed: str) -> None:
    assert re.search(r"^nftables\b", printed, re.MULTILINE)


def test_service_answers_each_time(printed: str) -> None:
    """ClusterIP, node port, after the change, after the damage, after the end of kproxy."""
    assert printed.count("hello from the pod") == 5


def test_process_reports(printed: str) -> None:
    assert '"healthy":true' in printed
    assert "kubeproxy_sync_proxy_rules_duration_seconds_count" in printed
