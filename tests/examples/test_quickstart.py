"""Every command of docs/quickstart.md runs, in the order of the page, and prints what stands below it."""

from pathlib import Path

from tests.examples.pages import CHECKOUT, expect_outputs


def test_every_command_prints_what_stands_below_it(tmp_path: Path) -> None:
    """Among others the Service answers each time: before and after changes, damage, a switch, and the end."""
    expect_outputs(CHECKOUT / "docs" / "quickstart.md", tmp_path, at_least=8)
