"""A short soak in all modes that work here, five minutes in CI. `make soak` is the long one."""

import os
import subprocess
import sys
from pathlib import Path

SECONDS = float(os.environ.get("SOAK_SECONDS", "90"))
"""Long enough for every kind of damage in most modes; a longer soak finds leaks."""
CHECKOUT = Path(__file__).parents[2]
SLACK = 420
"""Seconds for starts, comparisons and the end."""


def test_only_damage_makes_connections_fail_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-m", "tests.soak", "--minutes", str(SECONDS / 60),
               "--directory", str(tmp_path / "soak")]  # fmt: skip
    done = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=SECONDS + SLACK)
    assert done.returncode == 0, done.stdout + done.stderr
