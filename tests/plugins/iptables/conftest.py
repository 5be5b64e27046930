"""A lock file of its own for each test that runs legacy programs."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default lock file is shared by the whole machine."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
