"""The mode in docs/writing-a-backend.md that builds on another one, and sabotages of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core.contract.errors import PluginFailed
from kproxy_core.model.address import Family
from kproxy_core.testing.conformance import bench, contract, lifecycle
from kproxy_core.testing.conformance.checks import Failed
from kproxy_core.testing.conformance.subject import Wanted
from tests.core.installed_plugins import on_path

DOCUMENT = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
CHECKS = {check.name: check for check in (*lifecycle.CHECKS, *contract.CHECKS)}
WANTED = Wanted("audited", ("audited",))
KEEPS_BASE = "keeps-its-base-at-work"
WRAPPER = "    @hookimpl(wrapper=True)\n    def {hook}("


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


def replacing(hook: str, base: str, instead: str = "") -> str:
    """Return the example, with a plain *hook* that has *instead* in place of the call to its *base*."""
    source, wrapper = example(), WRAPPER.format(hook=hook)
    assert wrapper in source
    assert base in source
    plain = source.replace(wrapper, wrapper.replace("(wrapper=True)", ""))
    return plain.replace(base, instead) if instead else plain


SYNC = (
    "kproxy_sync", "report = yield",
    "from kproxy_core.contract.values import SyncReport as R; report = R(0)")
RENDER = ("kproxy_render", "return (yield) + f", "return f")


@pytest.mark.parametrize(("hook", "base", "instead", "words"), [
    (*SYNC, "the kernel lacks what nftables alone programs, such as"),
    (*RENDER, "kproxy_render lacks what nftables alone renders, such as"),
])  # fmt: skip
def test_a_mode_that_replaces_a_hook_of_its_base_is_noticed(
    directory: Path, hook: str, base: str, instead: str, words: str
) -> None:
    (directory / "audited.py").write_text(replacing(hook, base, instead))
    assert words in problem(KEEPS_BASE)


@pytest.mark.parametrize(("hook", "base"), [SYNC[:2], RENDER[:2]])
def test_a_hook_that_yields_without_being_a_wrapper_is_told(directory: Path, hook: str, base: str) -> None:
    (directory / "audited.py").write_text(replacing(hook, base))
    with pytest.raises(PluginFailed, match=f"{hook} returned a generator: .*wrapper=True"):
        problem(KEEPS_BASE)
