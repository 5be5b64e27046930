"""What `kernel_checks` and `switch_checks` found, one case for each of their tests.

They run in a guest with IPVS:
``tests/guest/run .venv/bin/python -m pytest -p tests.plugins.ipvs.rig tests/plugins/ipvs/kernel_checks.py``
"""

import ast
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.guest.guest import Guest

CHECKS = [Path(__file__).with_name(f"{name}_checks.py") for name in ("kernel", "switch")]
FIXTURES = "tests.plugins.ipvs.rig"
LONGEST = 900
"""Seconds."""


def names() -> list[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in CHECKS]
    return [
        node.name for tree in trees for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By test: for each of its cases what went wrong, or "". """
    directory = tmp_path_factory.mktemp("guest")
    report = directory / "report.xml"
    options = ["-p", "no:cacheprovider", "-p", FIXTURES, f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, CHECKS)]
    with Guest(command, directory / "log", share=directory, seconds=LONGEST) as guest:
        guest.status()
        assert report.exists(), guest.output
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [part.text or "" for part in case if part.tag in ("failure", "error", "skipped")]
        found.setdefault(str(case.get("name")).partition("[")[0], []).append("\n".join(problems))
    return found


@pytest.mark.parametrize("name", names())
def test_in_the_guest(name: str, results: dict[str, list[str]]) -> None:
    assert name in results
    assert not any(results[name]), "\n".join(results[name])
