"""A short soak in all modes that work here, two and a half minutes in CI. `make soak` is the long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

SECONDS = float(os.environ.get("SOAK_SECONDS", "90"))
"""Long enough for every kind of damage in most modes; a longer soak finds leaks."""
LOAD = ("--connections", "2", "--rate", "25") if SECONDS < 150 else ()
"""A short soak has half the load of a long one, which finds rare faults: others need the processors."""
CHECKOUT = Path(__file__).parents[2]
SLACK = 600
"""Seconds for starts, comparisons, laps and the end."""


def test_only_damage_makes_connections_fail_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "soak"
    command = [sys.executable, "-B", "-m", "tests.soak", "--minutes", str(SECONDS / 60),
               *LOAD, "--directory", str(directory)]  # fmt: skip
    # pytest shows its events and tables after a failure; the message is about the problems alone.
    done = subprocess.run(command, cwd=CHECKOUT, check=False, timeout=SECONDS + SLACK)
    report = directory / "report.json"
    problems = json.loads(report.read_text())["problems"] if report.exists() else ["it wrote no report"]
    assert not problems, "\n".join(map(_shortened, problems))
    assert done.returncode == 0


def _shortened(problem: str) -> str:
    """Return the first line, and the last one: that of a traceback names the exception."""
    first, *others = problem.splitlines()
    return "\n  ... ".join(line[:300] for line in (first, *others[-1:]))
