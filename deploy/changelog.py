"""What the next release says, from the files of changelog.d: `make changelog`.

Each change is a file of its own, ``NAME.KIND.md``, so that no two changes conflict. The section "Unreleased"
of CHANGELOG.md, where entries were before, counts too. `make release` makes both a section of that page.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
DIRECTORY = "changelog.d"
PAGE = "CHANGELOG.md"
UNRELEASED = "Unreleased"

BEFORE, BACK = "Before the upgrade", "The way back"
KINDS: Mapping[str, str] = {
    "before": BEFORE, "back": BACK, "added": "Added", "changed": "Changed", "deprecated": "Deprecated",
    "removed": "Removed", "mended": "Mended",
}
"""The headings of the kinds, in their order."""

Sections = dict[str, str]
"""The entries of a release, a list in Markdown, by heading."""


class ChangelogError(Exception):
    """Files of changelog.d that cannot be read as changes, one to a line."""


def fragments(directory: Path) -> Sections:
    """Return the entries in *directory*, in the order of their files. Raises ChangelogError."""
    found: Sections = {}
    mistakes = []
    naming = f"name it NAME.KIND.md, with a kind of {', '.join(KINDS)}"
    writing = "write what an operator gets, without a heading or a bullet"
    for path in sorted(directory.iterdir()) if directory.exists() else ():
        name = re.fullmatch(r"[\w-]+\.(\w+)\.md", path.name)
        text = path.read_text(encoding="utf-8").strip()
        if name is None or name[1] not in KINDS:
            mistakes.append(f"{DIRECTORY}/{path.name}: {naming}")
        elif not text or text.startswith(("- ", "* ", "#")):
            mistakes.append(f"{DIRECTORY}/{path.name}: {writing}")
        else:
            heading = KINDS[name[1]]
            entry = "\n".join(f"  {line}".rstrip() for line in text.splitlines()).strip()
            found[heading] = f"{found.get(heading, '')}- {entry}\n"
    if mistakes:
        raise ChangelogError("\n".join(mistakes))
    return found


def section(page: str, title: str) -> str:
    """Return the text of the section *title* of CHANGELOG.md, without the title; "" if there is none."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found[1].strip("\n") if found else ""


def sections(text: str) -> Sections:
    """Return the entries of a section of CHANGELOG.md. A heading is a line that ends with a colon."""
    parts = re.split(r"^([A-Z][^\n]*):\n\n", text, flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {heading: entries.strip("\n") + "\n" for heading, entries in pairs}


def merged(first: Sections, second: Sections) -> Sections:
    """Return the entries of both, in the order of `KINDS`; another heading keeps its place in *first*."""
    names = list(first)
    order = list(KINDS.values())
    for heading in (heading for heading in order if heading in second and heading not in first):
        later = (at for at, name in enumerate(names) if name in order[order.index(heading):])
        names.insert(next(later, len(names)), heading)
    return {name: first.get(name, "") + second.get(name, "") for name in names}


def unreleased(root: Path) -> Sections:
    """Return what the next release of the checkout *root* says. Raises ChangelogError."""
    page = (root / PAGE).read_text(encoding="utf-8")
    return merged(sections(section(page, UNRELEASED)), fragments(root / DIRECTORY))


def as_text(found: Sections) -> str:
    return "\n".join(f"{heading}:\n\n{entries}" for heading, entries in found.items())


def released(page: str, version: str, found: Sections) -> str:
    """Return CHANGELOG.md with *found* as the section of *version* in place of "Unreleased"."""
    title, _, older = re.sub(
        rf"^## {UNRELEASED}\n.*?(?=^## |\Z)", "", page, flags=re.MULTILINE | re.DOTALL).partition("\n\n")
    return f"{title}\n\n## {version}\n\n{as_text(found)}\n{older}"


def versions(page: str) -> Iterable[str]:
    """Return the versions that have a section, the newest first."""
    return [title for title in re.findall(r"^## (.*)$", page, re.MULTILINE) if title != UNRELEASED]


def main(root: Path = CHECKOUT) -> int:
    try:
        found = unreleased(root)
    except ChangelogError as error:
        print(error, file=sys.stderr)
        return 1
    print(as_text(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
