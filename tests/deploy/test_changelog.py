"""The changelog: files of changelog.d, the section "Unreleased", and what a release makes of both."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy import changelog
from deploy.changelog import KINDS, ChangelogError, fragments, merged, released, section, sections, unreleased

CHECKOUT = Path(__file__).parents[2]
PAGE = """# Changes

## Unreleased

Newer entries are elsewhere.

Added:

- An old entry,
  in two lines.

Added, all off by default:

- Another.

Mended:

- A mistake.

## 0.2.0

- The first release.

New:

- A mode.
"""


def write(directory: Path, **texts: str) -> Path:
    directory.mkdir()
    for name, text in texts.items():
        (directory / f"{name.replace('__', '.')}.md").write_text(text)
    return directory


def test_a_file_is_an_entry_of_its_kind(tmp_path: Path) -> None:
    written = write(
        tmp_path / "changelog.d", b__added="B is new,\nin two lines.\n", a__added="A is new.\n",
        c__before="Stop.\n")
    assert fragments(written) == {
        "Before the upgrade": "- Stop.\n", "Added": "- A is new.\n- B is new,\n  in two lines.\n"}


def test_files_that_cannot_be_read_are_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ChangelogError) as refused:
        fragments(write(
            tmp_path / "changelog.d", a__new="A.", b="B.", c__added=" \n", d__added="- D.", e__added="E."))
    kinds = f"name it NAME.KIND.md, with a kind of {', '.join(KINDS)}"
    text = "write what an operator gets, without a heading or a bullet"
    assert str(refused.value).splitlines() == [
        f"changelog.d/a.new.md: {kinds}", f"changelog.d/b.md: {kinds}",
        f"changelog.d/c.added.md: {text}", f"changelog.d/d.added.md: {text}"]


def test_entries_of_the_page_come_first_and_headings_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path / "changelog.d", a__added="A is new.", b__before="Stop.", c__removed="C has ended.")
    (tmp_path / "CHANGELOG.md").write_text(PAGE)
    found = unreleased(tmp_path)
    assert list(found.items()) == [
        ("Before the upgrade", "- Stop.\n"),
        ("Added", "- An old entry,\n  in two lines.\n- A is new.\n"),
        ("Added, all off by default", "- Another.\n"),
        ("Removed", "- C has ended.\n"),
        ("Mended", "- A mistake.\n"),
    ]


def test_a_release_makes_them_its_section() -> None:
    found = merged(sections(section(PAGE, "Unreleased")), {"Added": "- A is new.\n"})
    page = released(PAGE, "1.0.0", found)
    assert page.startswith(
        "# Changes\n\n## 1.0.0\n\nAdded:\n\n- An old entry,\n  in two lines.\n- A is new.\n\nAdded, all")
    assert page.endswith("- A mistake.\n\n" + PAGE[PAGE.index("## 0.2.0"):])
    assert changelog.versions(page) == ["1.0.0", "0.2.0"]
    assert sections(section(page, "1.0.0")) == found
    later = released(page, "1.1.0", {"Added": "- More.\n"})
    assert later == page.replace("## 1.0.0", "## 1.1.0\n\nAdded:\n\n- More.\n\n## 1.0.0", 1)


def test_the_next_release_of_this_checkout_has_every_entry() -> None:
    done = subprocess.run(
        ["make", "--silent", "changelog", f"PYTHON={sys.executable}"], cwd=CHECKOUT, capture_output=True,
        text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = list((CHECKOUT / "changelog.d").glob("*.md"))
    page = (CHECKOUT / "CHANGELOG.md").read_text()
    entries = section(page, "Unreleased").count("\n- ") + len(files)
    assert f"\n{done.stdout}".count("\n- ") == entries
