"""The mode in docs/writing-a-backend.md that builds on another one, and sabotages of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_conformance.checks import bench, contract, lifecycle
from kproxy_conformance.checks.check import Failed
from kproxy_conformance.checks.subject import Wanted
from kproxy_core.contract.errors import PluginFailed
from kproxy_core.model.address import Family
from tests.core.installed_plugins import on_path

DOCUMENT = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
CHECKS = {check.name: check for check in (*lifecycle.CHECKS, *contract.CHECKS)}
WANTED = Wanted("audited", ("audited",))
KEEPS_BASE = "keeps-its-base-at-work"


def example() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.partition("runs this block as audited.py -->\n```python\n")[2].partition("```")[0]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "audited.py").write_text(example())
    with on_path(tmp_path):
        yield tmp_path


def problem(name: str) -> str:
    """Return what a check complains about; "" if it passes."""
    try:
        bench.run_check(CHECKS[name], WANTED, None if None in CHECKS[name].families else Family.IPV4)
    except Failed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("check", [
    KEEPS_BASE, "describes-itself", "detects-without-a-trace", "full-sync-writes-and-reports",
    "second-full-sync-writes-nothing", "damage-is-repaired", "watches-or-says-so",
    "renders-the-same-anywhere", "cleanup-leaves-nothing",
    "retires-without-connections-at-once", "close-lets-go-of-everything",
])  # fmt: skip
def test_the_documented_mode_passes(directory: Path, check: str) -> None:
    assert problem(check) == ""


def replacing(base: str, instead: str) -> str:
    """Return the example, with *instead* in place of the call to its *base*."""
    source = example()
    assert base in source
    return source.replace(base, instead)


SYNC = "report = self.base.sync(update)", "from kproxy_core.contract import SyncReport as R; report = R(0)"
RENDER = "return self.base.render(update) + f", "return f"


@pytest.mark.parametrize(("base", "instead", "words"), [
    (*SYNC, "the kernel lacks what nftables alone programs, such as"),
    (*RENDER, r"render() lacks what nftables alone renders, such as"),
])  # fmt: skip
def test_a_mode_that_replaces_a_method_of_its_base_is_noticed(
    directory: Path, base: str, instead: str, words: str
) -> None:
    (directory / "audited.py").write_text(replacing(base, instead))
    assert words in problem(KEEPS_BASE)


@pytest.mark.parametrize(("base", "instead", "method"), [
    (SYNC[0], "report = yield", "kproxy_sync"), (RENDER[0], "return (yield) + f", "render"),
])
def test_a_method_that_yields_is_told(directory: Path, base: str, instead: str, method: str) -> None:
    (directory / "audited.py").write_text(replacing(base, instead))
    with pytest.raises(PluginFailed, match=f"{method} returned a generator: .*wrapper=True"):
        problem(KEEPS_BASE)
