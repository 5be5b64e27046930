"""Every command of docs/debugging.md runs, in the order of the page, and prints what stands below it."""

from pathlib import Path

from tests.examples.pages import CHECKOUT, expect_outputs


def test_every_command_prints_what_stands_below_it(tmp_path: Path) -> None:
    expect_outputs(CHECKOUT / "docs" / "debugging.md", tmp_path, at_least=9)
