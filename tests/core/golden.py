"""Where kube-proxy's own answers are kept as data: ``tests/golden``."""

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def golden(name: str) -> Path:
    """One of kube-proxy's answers."""
    path = GOLDEN / name
    assert path.is_file(), f"no {path}"
    return path
