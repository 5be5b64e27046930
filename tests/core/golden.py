"""Where kube-proxy's own answers are kept as data: ``shared/golden``."""

import os
from pathlib import Path

SHARED = Path(os.environ.get("KPROXY_SHARED") or Path(__file__).resolve().parents[3] / "shared")


def golden(name: str) -> Path:
    """One of kube-proxy's answers."""
    path = SHARED / "golden" / name
    assert path.is_file(), f"no {path}: put `shared` beside the checkout, or name it in KPROXY_SHARED"
    return path
