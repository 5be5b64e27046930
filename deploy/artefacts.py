"""Builds what a release has: `make dist`, `make chart`, and all of it in `make release`.

The bytes follow from the commit and the versions of setuptools, wheel and dpkg. Those of images do not: they
get Debian's packages of the day.
"""

import gzip
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
IMAGES = ("kproxy", "ebpf")
"""The targets of deploy/Containerfile."""

_BUILD = """
import os, sys
from setuptools import build_meta
os.umask(0o022)
getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2])
"""


class BuildError(Exception):
    """A program that failed, with its output."""


def run(command: Sequence[str | Path], root: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in *root* and return its output. Raises BuildError."""
    try:
        done = subprocess.run(
            command, cwd=root, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
            check=False)
    except OSError as error:
        raise BuildError(str(error)) from None
    if done.returncode:
        raise BuildError(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


def version(root: Path) -> str:
    """Return the version of what is built from *root*."""
    return run([sys.executable, "kproxy_core/config/release.py"], root)


def epoch(root: Path) -> Mapping[str, str]:
    """Return the time of the commit as the variable that programs take all times from."""
    return {"SOURCE_DATE_EPOCH": run(["git", "log", "-1", "--format=%ct"], root)}


def packages(root: Path, directory: Path) -> None:
    """Build the sdist, the wheel, and the wheel of the kit."""
    for kind, sources in (("sdist", root), ("wheel", root), ("wheel", root / "conformance")):
        run([sys.executable, "-c", _BUILD, kind, directory.resolve()], sources, epoch(root))
    run(["rm", "-r", "conformance/build"], root)


def deb(root: Path, directory: Path) -> None:
    """Build the package for Debian, for the architecture of this machine."""
    run(["deploy/deb/build", sys.executable, directory.resolve()], root, epoch(root))


def chart(root: Path, directory: Path) -> None:
    """Pack the chart. Unlike ``helm package``, with the version of *root* and without the time of day."""
    built = version(root)
    at = root / "deploy" / "chart"
    files = {str(path.relative_to(at)): path.read_bytes() for path in sorted(at.rglob("*")) if path.is_file()}
    about = files["Chart.yaml"].decode()
    for field, value in (("version", semantic(built)), ("appVersion", built)):
        about = re.sub(rf"^{field}: .*", f"{field}: {value}", about, flags=re.MULTILINE)
    files["Chart.yaml"] = about.encode()
    time = int(epoch(root)["SOURCE_DATE_EPOCH"])
    with ((directory / f"kproxy-chart-{semantic(built)}.tgz").open("wb") as file,
          gzip.GzipFile("", "wb", fileobj=file, mtime=time) as compressed,
          tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive):
        for name, data in files.items():
            entry = tarfile.TarInfo(f"kproxy/{name}")
            entry.size, entry.mtime = len(data), time
            archive.addfile(entry, BytesIO(data))


def semantic(version: str) -> str:
    """Return *version* (PEP 440) as a chart needs it (semver.org), such as ``1.0.0-dev.7+g0123456789ab``."""
    return version.replace(".dev", "-dev.")


def images(root: Path, directory: Path, builder: str) -> None:
    """Build both images with *builder*, which takes the arguments of podman, and save them."""
    built, commit = version(root), run(["git", "rev-parse", "HEAD"], root)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    for target in IMAGES:
        tag = built.replace("+", "-") + ("" if target == "kproxy" else f"-{target}")
        run([builder, "build", "--file=deploy/Containerfile", f"--target={target}",
             f"--build-arg=VERSION={built}", f"--build-arg=COMMIT={commit}", f"--tag=kproxy:{tag}", "."],
            root)
        saved = directory.resolve() / f"kproxy-image-{tag}-{machine}.tar"
        run([builder, "save", f"--output={saved}", f"kproxy:{tag}"], root)


def main(words: Sequence[str]) -> int:
    """Build what *words* name in dist/."""
    directory = CHECKOUT / "dist"
    directory.mkdir(exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    try:
        for word in words:
            {"dist": packages, "chart": chart}[word](CHECKOUT, directory)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for path in sorted(directory.iterdir()):
        if before.get(path) != path.stat().st_mtime_ns:
            print(path.relative_to(CHECKOUT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
