"""Processes that run modules of this package."""

import os
import subprocess
from pathlib import Path

import pytest

from kproxy_core.linux import process

HOSTILE = ("random", "socket", "msgspec", "signal", "encodings", "kproxy_core")


@pytest.mark.parametrize("module", ["kproxy_core.linux.relay.worker", "kproxy_core.kube.loader"])
@pytest.mark.parametrize("path", ["", "here"])
def test_nothing_is_imported_from_the_working_directory_or_by_the_environment(
    tmp_path: Path, module: str, path: str
) -> None:
    """Another user may be able to write to the directory in which root starts kproxy."""
    marker = tmp_path / "imported"
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()")
    ended = subprocess.run(
        process.interpreter(module), cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path) if path else "", "PYTHONSTARTUP": "random.py"})
    assert "arguments" in ended.stderr  # It came as far as the function of the module.
    assert not marker.exists()
