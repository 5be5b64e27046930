"""The example backend, as its readers install and test it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.conftest import EXAMPLE


def test_example_is_installed_and_passes_its_own_tests(tmp_path: Path) -> None:
    """As its README says: pip install, pytest."""
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    subprocess.run(["cp", "-r", EXAMPLE, checkout], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", site, checkout], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no"],
        cwd=checkout, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "kproxy-conformance of mode plain" in done.stdout
    assert (
        "packets::affinity-keeps-a-client-at-its-endpoint[IPv4]: not applicable:"
        " the backend announces: session affinity is not kept" in done.stdout
    )
