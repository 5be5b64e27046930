"""The commands of README.md print what stands below them."""

import re
from pathlib import Path

from tests.examples.pages import CHECKOUT, outputs_of

PAGE = CHECKOUT / "README.md"


def test_the_first_screen_shows_a_real_answer(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert outputs_of(PAGE, tmp_path) == [shown]
