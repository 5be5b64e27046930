"""The tests in docs/writing-a-backend.md that need no kernel pass."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
NAMES = "test_the_chain_is_written", "test_a_refused_transaction_changes_nothing"


def example() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.partition("runs this block as test_example.py -->\n```python\n")[2].partition("```")[0]


def test_the_page_has_these_tests() -> None:
    assert tuple(re.findall(r"^def (\w+)", example(), re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_documented_test_passes(name: str) -> None:
    module: dict[str, object] = {}
    exec(example(), module)  # noqa: S102 - the page's own
    test = module[name]
    assert callable(test)
    test()
