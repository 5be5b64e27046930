"""The observers in docs/writing-a-backend.md observe."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_conformance.builders import full_update, node_view, plans, service
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings, SyncReport
from kproxy_core.model.address import Family
from tests.core.contract.test_registry import plugin
from tests.core.installed_plugins import install, on_path

DOCUMENT = Path(__file__).parents[3] / "docs" / "writing-a-backend.md"
NODE = node_view()
UPDATE = full_update(NODE, plans(NODE, service("web")))
NAMES = ("slow_syncs", "dry_run")


def block(name: str) -> str:
    mark = f"runs this block as {name}.py -->\n```python\n"
    marked = DOCUMENT.read_text(encoding="utf-8").partition(mark)[2]
    assert marked
    return marked.partition("```")[0]


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    modules = {name: block(name) for name in NAMES}
    install(tmp_path, "good", {"good": "good_plugin"}, good_plugin=plugin("good"), **modules)
    with on_path(tmp_path):
        yield


def test_slow_syncs_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    instance = Registry(plugins=["slow_syncs"]).make_backend("good", BackendSettings((Family.IPV4,)))
    observer = sys.modules["slow_syncs"]
    assert instance.sync(UPDATE) == SyncReport(1)
    assert caplog.records == []
    observer.SLOW = 0.0  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        instance.sync(UPDATE)
    assert [record.message for record in caplog.records] == ["slow sync"]
    assert [m.value for answer in instance.measure() for m in answer if m.name == "slow_syncs_total"] == [1]


def test_a_dry_run_reaches_no_backend(capsys: pytest.CaptureFixture[str]) -> None:
    instance = Registry(plugins=["dry_run"]).make_backend("good", BackendSettings((Family.IPV4,)))
    assert instance.sync(UPDATE) == SyncReport(0)
    assert capsys.readouterr().out == "IPv4 full default/web\n"
