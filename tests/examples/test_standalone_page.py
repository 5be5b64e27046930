"""The commands of docs/standalone.md that need no running systemd run, and print what the page promises."""

import re

import pytest

from kproxy_core.kube.directory import read_manifest
from tests.examples.pages import CHECKOUT, outputs_of

PAGE = CHECKOUT / "docs" / "standalone.md"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The standard output of each block."""
    return outputs_of(PAGE, tmp_path_factory.mktemp("page"))


def test_a_forward_is_rendered_and_explained_by_its_name(printed: list[str]) -> None:
    assert "the IPv4 rules of mode nftables are accepted" in printed[1]
    assert "203.0.113.20:443/TCP: load balancer IP of Forward/web:443, file web.yaml" in printed[1]
    assert re.findall(r"10\.0\.0\.1\d:8443  50\.0%", printed[1])


def test_both_servers_answer(printed: list[str]) -> None:
    assert sum(map(int, re.findall(r"(\d+) hello from the (?:first|second)", printed[2]))) == 20
    assert re.search(r"^hello from the (first|second)$", printed[2], re.MULTILINE)


def test_no_request_fails_once_a_server_is_left_out(printed: list[str]) -> None:
    assert "not chosen  10.0.0.12:8443  its check fails" in printed[3]
    assert "     20 hello from the first\n" in printed[3]
    assert "endpoint is left out, its check fails forward=web endpoint=10.0.0.12:8443" in printed[3]
    assert 'kproxy_forward_endpoint_left_out{endpoint="10.0.0.12:8443",forward="web"} 1' in printed[3]


def test_relays_serve_without_privileges(printed: list[str]) -> None:
    assert printed[4].endswith("hello from the first\n")


def test_the_forward_at_the_top_of_the_page_is_valid() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found = read_manifest("web.yaml", example.encode())
    assert (found.bad, [key for key, value in found.objects if value]) == ([], [("Forward", ("", "web"))])
