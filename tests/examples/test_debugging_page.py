"""Every command of docs/debugging.md runs, in the order of the page, and prints what stands below it."""

import re
from pathlib import Path

from tests.examples.pages import CHECKOUT, outputs_of

PAGE = CHECKOUT / "docs" / "debugging.md"

_VARIES = re.compile(r" # handle \d+|\d{4}-\d\d-\d\dT[\d:.]+Z |(?<=\d):\d+(?= -> )")
"""Handles of rules, times, and source ports."""

_SHOWN = re.compile(r"^```sh\n.*?^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_every_command_prints_what_stands_below_it(tmp_path: Path) -> None:
    shown = [found[1] for found in _SHOWN.finditer(PAGE.read_text(encoding="utf-8"))]
    printed = outputs_of(PAGE, tmp_path)
    assert len(printed) == len(shown)
    assert sum(text is not None for text in shown) > 8
    for text, output in zip(shown, printed, strict=True):
        if text is not None:
            assert _VARIES.sub("", output) == _VARIES.sub("", text)
