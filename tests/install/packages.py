"""The package for Debian, built from this checkout, and a newer one."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
NEWER = "99.0"
"""The version of the newer package."""
_IN = "usr/lib/kproxy/lib/python3/site-packages/kproxy_core/VERSION"


def build(directory: Path) -> Path:
    """Build the package of this checkout, uncompressed, in *directory*, and return its path."""
    command = ["deploy/deb/build", sys.executable, str(directory), "-Znone"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def newer(package: Path, directory: Path) -> Path:
    """Return *package* as version `NEWER`, in *directory*."""
    root = directory / "newer"
    subprocess.run(["dpkg-deb", "--raw-extract", package, root], check=True)
    control = root / "DEBIAN" / "control"
    subprocess.run(["sed", "-i", f"s/^Version: .*/Version: {NEWER}/", control], check=True)
    (root / _IN).write_text(f"{NEWER} \n", encoding="ascii")
    made = directory / f"kproxy_{NEWER}.deb"
    subprocess.run(["dpkg-deb", "--build", "-Znone", root, made], check=True, stdout=subprocess.DEVNULL)
    return made
