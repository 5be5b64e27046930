"""Wheels and sdists that are built from a checkout hold its commit, and every file of the packages."""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PACKAGES = ("kproxy_core", "plugins", "bpf")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, sources: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` from *sources*, and return its path."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", "dist"], cwd=sources, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sources / "dist" / done.stdout.splitlines()[-1]


def copied_by_the_containerfile() -> list[str]:
    text = (CHECKOUT / "deploy" / "Containerfile").read_text()
    return [
        source
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) if not line.startswith("--from")
        for source in shlex.split(line)[:-1]
    ]  # fmt: skip


def checkout(directory: Path) -> Path:
    """Return a copy of the files that a build needs, as the image has them."""
    for name in copied_by_the_containerfile():
        if (CHECKOUT / name).is_dir():
            shutil.copytree(
                CHECKOUT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(CHECKOUT / name, directory)
    return directory


def test_packages_of_a_checkout_hold_its_commit_and_all_files(tmp_path: Path) -> None:
    sources = checkout(tmp_path)
    (sources / ".git").mkdir()
    (sources / ".git" / "HEAD").write_text(f"{COMMIT}\n")
    files = {
        str(path.relative_to(root.parent if root.name == "kproxy_core" else root))
        for root in (sources / name for name in PACKAGES)
        for path in root.rglob("*") if path.is_file() and path.suffix != ".md"
    }  # fmt: skip
    sdist = build("sdist", sources)
    subprocess.run(["tar", "-xf", sdist, "-C", tmp_path], check=True)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (unpacked / "kproxy_core" / "COMMIT").read_text().strip() == COMMIT[:12]
    assert not (sources / "kproxy_core" / "COMMIT").exists()
    for of in (sources, unpacked):
        with zipfile.ZipFile(build("wheel", of)) as archive:
            assert archive.read("kproxy_core/COMMIT").decode().strip() == COMMIT[:12]
            assert files - set(archive.namelist()) == set()


def test_the_wheel_of_the_kit_holds_all_its_files(tmp_path: Path) -> None:
    sources = tmp_path / "conformance"
    without = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(CHECKOUT / "conformance", sources, ignore=without)
    files = {
        str(path.relative_to(sources))
        for path in (sources / "kproxy_conformance").rglob("*") if path.is_file() and path.suffix != ".md"
    }  # fmt: skip
    with zipfile.ZipFile(build("wheel", sources)) as archive:
        assert files - set(archive.namelist()) == set()


@pytest.mark.parametrize("commit", [COMMIT, ""])
def test_the_image_is_built_with_the_given_commit(tmp_path: Path, commit: str) -> None:
    text = (CHECKOUT / "deploy" / "Containerfile").read_text()
    (command,) = re.findall(r"^ARG COMMIT=\nRUN (.*)$", text, re.MULTILINE)
    sources = checkout(tmp_path)
    written = command.replace("/src/", f"{sources}/")
    subprocess.run(["sh", "-c", written], env={"COMMIT": commit}, check=True)
    with zipfile.ZipFile(build("wheel", sources)) as archive:
        assert archive.read("kproxy_core/COMMIT").decode().strip() == commit[:12]


def test_the_page_about_deployment_tells_the_image_its_commit() -> None:
    assert "--build-arg COMMIT=$(git rev-parse HEAD)" in (CHECKOUT / "docs" / "deploy.md").read_text()
