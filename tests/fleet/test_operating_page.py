"""Every command of docs/operating.md runs in a cluster, and prints what stands below it."""

import re
from pathlib import Path

from tests.fleet.fleet import Fleet
from tests.fleet.operating import Step, run, written

_VARIES = (
    (r"(?<![\d.])\d+\.\d+\.\d+(\.dev\d+\S*)?( \([0-9a-f]{12}\))?(?= )", "VERSION"),
    (r"\d+ (s|min|h|d)\b( ago)?", "TIME"),
    (r"\d+ findings?\b", ""),  # about this machine
    (r":\d+ answered", ":PORT answered"),
    (r"resource version \d+", "resource version N"),
    (r"^shop/web .*", "shop/web"),  # counts of connections
    # A node reaches an endpoint by chance.
    (r"^(FRONTEND SERVICE PORT) .*", r"\1"),
    (r"^(10\.96\.0\.10:80 shop/web|TOTAL) .*", r"\1"),
    (r"^10\.96\.0\.10:80 from .*: endpoint (.*): \d+ of \d+ connections", r"\1"),
    (r"^\d of 3 pairs", "N of 3 pairs"),
)


def stable(text: str) -> list[str]:
    """Return the lines of *text* that do not vary from run to run, each once and without its alignment."""
    lines = []
    for line in text.splitlines():
        kept = " ".join(line.split())
        for pattern, replacement in _VARIES:
            kept = re.sub(pattern, replacement, kept)
        lines.append(" ".join(kept.split()))
    return list(dict.fromkeys(lines))


def test_every_command_prints_what_stands_below_it(fleet: Fleet, tmp_path: Path) -> None:
    steps = run(fleet, tmp_path)
    assert sum(step.shown is not None for step in steps) > 12
    for step in steps:
        if step.shown is not None:
            assert stable(step.printed) == stable(step.shown), step.command


def test_outputs_are_put_below_their_commands() -> None:
    page = "## A\n\n```sh\none\n```\n\n```text\nold\n```\n\n```sh\ntwo\n```\n"
    steps = [Step("one\n", "old\n", "new\n"), Step("two\n", None, "not shown\n")]
    assert written(page, steps) == page.replace("old", "new")
