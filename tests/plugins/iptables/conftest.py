"""Locks of the legacy programs that bind a test to nobody else."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lock of the legacy programs is for the whole machine otherwise."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
