"""Modules of tests that run in a guest, where kernel and root are theirs alone."""

import ast
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.guest.guest import Guest, with_nft

Problems = dict[str, list[str]]
"""By test: for each of its cases what went wrong, or ""."""


def names_of(checks: Iterable[Path]) -> list[str]:
    """The tests in the modules *checks*."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in checks]
    return [
        node.name for tree in trees for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]  # fmt: skip


def play(items: Sequence[pytest.Item], directory: Path) -> Problems:
    """Run the ``CHECKS`` of the modules of *items* in one guest."""
    modules = dict.fromkeys(item.module for item in items if isinstance(item, pytest.Function))
    return problems_of([path for module in modules for path in module.CHECKS], directory)


def problems_of(checks: Iterable[Path], directory: Path, *options: str) -> Problems:
    """Run *checks* in a guest. *directory* is for what is written, *options* go to pytest."""
    report = directory / "report.xml"
    fixed = ["-p", "no:cacheprovider", f"--junitxml={report}"]
    command = with_nft([sys.executable, "-m", "pytest", *fixed, *options, *checks])
    with Guest(command, directory / "log", share=directory) as guest:
        guest.status()
        assert report.exists(), guest.output
    found: Problems = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [part.text or "" for part in case if part.tag in ("failure", "error", "skipped")]
        found.setdefault(str(case.get("name")).partition("[")[0], []).append("\n".join(problems))
    return found
