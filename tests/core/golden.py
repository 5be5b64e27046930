"""kube-proxy's own answers as data, in ``tests/golden``."""

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def golden(name: str) -> Path:
    """One of kube-proxy's answers."""
    path = GOLDEN / name
    assert path.is_file(), f"no {path}"
    return path
