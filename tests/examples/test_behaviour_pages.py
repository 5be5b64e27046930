"""The pages of docs/design/behaviour say which version of kube-proxy each statement is from."""

import re
from pathlib import Path

import pytest

from tests.examples.pages import CHECKOUT

PAGES = sorted((CHECKOUT / "docs" / "design" / "behaviour").glob("*.md"))
SCENARIOS = CHECKOUT / "conformance" / "kproxy_conformance" / "scenarios"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_title_of_a_page_names_the_version_that_was_read(page: Path) -> None:
    title = page.read_text(encoding="utf-8").splitlines()[0]
    assert re.search(r"kube-proxy 1\.\d\d\b", title)


def changes() -> list[list[str]]:
    """Return the cells of each row of changes.md, without the heads of its tables."""
    lines = (PAGES[0].with_name("changes.md")).read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] != "change"]


@pytest.mark.parametrize("row", changes(), ids=lambda row: row[1])
def test_a_change_names_its_version_its_source_and_a_test_that_exists(row: list[str]) -> None:
    _, version, answer, proof = row
    assert re.match(r"1\.3[78]", version)
    assert re.search(r"#\d{6}|KEP-\d{4}", version)
    assert answer
    file, _, name = proof.strip("`").partition("::")
    if scenario := re.fullmatch(r"scenario `([\w-]+)`", proof):
        assert (SCENARIOS / f"{scenario[1]}.yaml").exists()
    else:
        texts = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob(file)]
        assert any(f"\ndef {name}(" in text for text in texts)
