"""The commands of README.md print what stands below them."""

from pathlib import Path

from tests.examples.pages import CHECKOUT, expect_outputs


def test_the_first_screen_shows_a_real_answer(tmp_path: Path) -> None:
    expect_outputs(CHECKOUT / "README.md", tmp_path, at_least=1)
