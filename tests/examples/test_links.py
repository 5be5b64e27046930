"""Relative links in Markdown files lead somewhere, headings included."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.changelog import DIRECTORY
from tests.examples.pages import CHECKOUT

_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_OF_OTHERS = {".venv", ".git", ".supply", "build", "dist", "node_modules"}


def pages() -> list[Path]:
    found = CHECKOUT.rglob("*.md")
    return sorted(page for page in found if not _OF_OTHERS & set(page.relative_to(CHECKOUT).parts))


def links(page: Path) -> Iterator[str]:
    """Yield the targets of *page* that are in this repository."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    yield from (link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of *page*, as GitHub makes them."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        # An entry becomes a part of CHANGELOG.md.
        place = CHECKOUT if page.parent.name == DIRECTORY else page.parent
        target = place / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("plugin", ["ebpf", "iptables", "ipvs", "nftables", "userspace"])
def test_a_page_of_a_plugin_names_modules_that_exist(plugin: str) -> None:
    page = CHECKOUT / "plugins" / f"kproxy_{plugin}" / "README.md"
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        places = (page.parent, page.parent / "kernel", CHECKOUT, CHECKOUT / "kproxy_core" / "linux" / "relay")
        assert any((place / name).exists() for place in places), name


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One Thing, `more`\n[a](#one-thing-more) [b](gone.md) [c](https://example.org)\n```\n[d](no)\n```\n")
    assert list(links(page)) == ["#one-thing-more", "gone.md"]
    assert anchors(page) == {"one-thing-more"}
