"""The example in docs/writing-a-backend.md is a backend."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from tests.core.installed_plugins import install, on_path

DOCUMENT = Path(__file__).parents[3] / "docs" / "writing-a-backend.md"
MARKS = ("runs this block as kproxy_textfile.py -->\n```python\n",
         "appends this block to kproxy_textfile.py -->\n```python\n")
MOST_LINES = 60
"""Of a minimal backend."""
BOTH = (Family.IPV4, Family.IPV6)
NODE = node_view()
WEB = plans(NODE, service("web", "80@30080"), endpoint_slice("web", "10.0.0.2", "10.0.0.1"))
RULES = "10.96.0.1 TCP 80 -> 10.0.0.1:8080 10.0.0.2:8080\n* TCP 30080 -> 10.0.0.1:8080 10.0.0.2:8080\n"
SETTINGS = BackendSettings(BOTH)


def blocks() -> list[str]:
    """Return the minimal backend of the page, and the method that it adds later."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return [text.partition(mark)[2].partition("```")[0] for mark in MARKS]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory that the example, installed, keeps its files in."""
    source = "\n".join(blocks())
    install(tmp_path, "kproxy-textfile", {"textfile": "kproxy_textfile"}, kproxy_textfile=source)
    monkeypatch.setenv("TEXTFILE_DIRECTORY", str(tmp_path / "kept"))
    with on_path(tmp_path):
        yield tmp_path / "kept"


def test_a_minimal_backend_is_three_hooks_and_one_method_with_one_import() -> None:
    source = blocks()[0]
    assert source.count("\n") <= MOST_LINES
    assert source.count("@hookimpl") == 3
    assert re.findall(r"^    def (\w+)", source, re.MULTILINE) == ["__init__", "sync"]
    assert len(re.findall(r"^from kproxy_core", source, re.MULTILINE)) == 1
    assert source.count('"textfile"') == 1


def test_it_follows_changes_and_starts_over_in_a_full_sync(kept: Path) -> None:
    registry = Registry()
    instance = registry.make_backend("textfile", SETTINGS)
    instance.sync(full_update(NODE, WEB))
    six = node_view(family=Family.IPV6)
    instance.sync(full_update(six, plans(six, service("six", ip="fd00::1"))))
    assert (kept / "IPv4.txt").read_text() == RULES
    assert instance.render(full_update(NODE, WEB)) == RULES

    dns = plans(
        NODE, service("dns", "53/UDP", ip="10.96.0.9"), endpoint_slice("dns", "10.0.0.9", ports=["53/UDP"])
    )
    instance.sync(changed_update(NODE, dns, dns))
    assert (kept / "IPv4.txt").read_text() == "10.96.0.9 UDP 53 -> 10.0.0.9:53\n" + RULES
    instance.sync(changed_update(NODE, {}, [*dns, *WEB]))
    assert (kept / "IPv4.txt").read_text() == ""
    assert instance.watch(lambda family, what: None) is False
    instance.close()


def test_a_failed_sync_has_remembered_nothing(kept: Path) -> None:
    registry = Registry()
    textfile = registry.make_backend("textfile", SETTINGS)
    kept.write_text("a file is in the way of the directory")
    with pytest.raises(SyncFailed, match="can't write"):
        textfile.sync(full_update(NODE, WEB))
    kept.unlink()
    textfile.sync(changed_update(NODE, {}, []))
    assert (kept / "IPv4.txt").read_text() == ""


def test_it_answers_the_questions(kept: Path) -> None:
    registry = Registry()
    assert registry.load("textfile").summary == "a text file of endpoints"
    assert registry.detect("textfile", SETTINGS).usable
    kept.mkdir()
    (kept / "IPv4.txt").touch()
    assert registry.cleanup("textfile", SETTINGS, dry_run=True).removed == (f"file {kept}/IPv4.txt",)
    assert registry.cleanup("textfile", SETTINGS, dry_run=False).removed == (f"file {kept}/IPv4.txt",)
    assert registry.cleanup("textfile", SETTINGS, dry_run=False).removed == ()
    assert os.listdir(kept) == []
