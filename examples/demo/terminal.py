"""The output of the demo."""

import os
import sys
from collections.abc import Sequence

_COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ
_BOLD, _DIM, _GREEN, _RED = "1", "2", "32", "31"


def _styled(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if _COLOURED else text


def title(text: str) -> None:
    print(f"\n{_styled(text, _BOLD)}", flush=True)


def note(text: str) -> None:
    print(f"  {text}", flush=True)


def aside(text: str) -> None:
    for line in text.splitlines():
        print(f"  {_styled(line, _DIM)}", flush=True)


def error(text: str) -> None:
    print(_styled(text, _RED), file=sys.stderr, flush=True)


class Verdict:
    """Prints each check with a mark, and counts the failed ones."""

    def __init__(self) -> None:
        self.checked = 0
        self.failed = 0

    def check(self, good: bool, text: str) -> None:
        self.checked += 1
        self.failed += not good
        mark = _styled("✓", _GREEN) if good else _styled("✗", _RED)
        print(f"  {mark} {text}", flush=True)

    def summary(self) -> int:
        """Print the totals, and return the exit status of the demo."""
        title(f"{self.checked - self.failed} of {self.checked} checks passed.")
        return 1 if self.failed else 0


class Table:
    """Columns of fixed width, so that each row can be printed as soon as it is known."""

    def __init__(self, verdict: Verdict, columns: Sequence[tuple[str, int]]) -> None:
        self._verdict = verdict
        self._widths = [width for _, width in columns]
        aside("  " + self._line([name for name, _ in columns]))

    def row(self, good: bool, cells: Sequence[str]) -> None:
        self._verdict.check(good, self._line(cells))

    def _line(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()
