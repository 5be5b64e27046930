"""Wheels and sdists from a checkout: what they hold, and that everybody builds the same bytes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kproxy_core.config.release import SOURCES

CHECKOUT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
IS_DEVELOPMENT = ".dev" in SOURCES
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, sources: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` from *sources*, and return its path."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", "dist"], cwd=sources, capture_output=True,
        text=True, check=False,
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


def tracked() -> list[str]:
    """Return the files of this checkout, by their paths."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if (CHECKOUT / path).is_file()]


def committed(directory: Path) -> str:
    """Make a repository of a copy of this checkout. Return its commit."""
    for path in tracked():
        to = directory / path
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CHECKOUT / path, to)
        to.chmod(0o644 | (CHECKOUT / path).stat().st_mode & 0o100)
    settings = {
        f"GIT_{who}_{what}": "2026-01-02T03:04:05Z" if what == "DATE" else "nobody"
        for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL", "DATE")}
    environment = {**os.environ, **settings, "GIT_CONFIG_GLOBAL": os.devnull}
    for command in ("init --quiet", "add --all", "commit --quiet --message=All", "rev-parse HEAD"):
        done = subprocess.run(["git", *command.split()], cwd=directory, env=environment, capture_output=True,
                              text=True, check=True)
    return done.stdout.strip()


def test_packages_hold_all_files_and_the_commit(tmp_path: Path) -> None:
    """A release has the same bytes everywhere: tests/install."""
    sources = tmp_path / "sources"
    commit = committed(sources)
    sdist, wheel = (build(kind, sources) for kind in ("sdist", "wheel"))
    version = f"{SOURCES.removesuffix('0')}1+g{commit[:12]}" if IS_DEVELOPMENT else SOURCES
    assert wheel.name.split("-")[1] == version
    assert not (sources / "kproxy_core" / "VERSION").exists()

    subprocess.run(["tar", "-xf", sdist, "-C", tmp_path], check=True)
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
        assert {entry.mtime for entry in archive} == {1767323045}  # the commit's
    assert set(tracked()) - held <= {".ci/run", ".gitignore"}
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert build("wheel", unpacked).read_bytes() == wheel.read_bytes()

    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("kproxy_core/VERSION").decode() == f"{version} {commit[:12]}\n"
        names = set(archive.namelist())
    data = f"kproxy-{version}.data"
    roots = {"kproxy_core": sources, "plugins": sources / "plugins", "bpf": sources / "bpf"}
    packed = {
        str((sources / path).relative_to(roots[path.partition("/")[0]]))
        for path in tracked() if path.partition("/")[0] in roots and not path.endswith(".md")
    }  # fmt: skip
    assert packed - names == set()
    assert {name.partition("/")[0] for name in names} == {
        *(path.partition("/")[0] for path in packed), f"kproxy-{version}.dist-info", data}
    pages = {Path(name).name for name in names if name.startswith(f"{data}/data/share/man/man8/")}
    assert pages == {path.name for path in (CHECKOUT / "docs" / "man").iterdir()}


def test_a_module_that_was_deleted_is_not_packed_again(tmp_path: Path) -> None:
    sources = checkout(tmp_path)
    stale = sources / "build" / "lib" / "kproxy_core" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with zipfile.ZipFile(build("wheel", sources)) as archive:
        assert "kproxy_core/stale.py" not in archive.namelist()


def test_the_wheel_of_the_kit_holds_all_its_files(tmp_path: Path) -> None:
    sources = checkout(tmp_path) / "conformance"
    without = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(CHECKOUT / "conformance", sources, ignore=without)
    (tmp_path / "kproxy_core" / "VERSION").write_text("1.2.3 0123456789ab\n")
    files = {
        str(path.relative_to(sources))
        for path in (sources / "kproxy_conformance").rglob("*") if path.is_file() and path.suffix != ".md"
    }  # fmt: skip
    with zipfile.ZipFile(build("wheel", sources)) as archive:
        assert files - set(archive.namelist()) == set()
        metadata = archive.read("kproxy_conformance-1.2.3.dist-info/METADATA").decode()
    assert "Requires-Dist: kproxy==1.2.3\n" in metadata.replace(" (==1.2.3)", "==1.2.3")


@pytest.mark.parametrize(("version", "commit", "shown"), [
    ("1.2.3", COMMIT, f"kproxy 1.2.3 ({COMMIT[:12]})"),
    (f"1.2.4.dev7+g{COMMIT[:12]}", COMMIT, f"kproxy 1.2.4.dev7+g{COMMIT[:12]}"),
    ("", COMMIT, f"kproxy {SOURCES}" + (f"+g{COMMIT[:12]}" if IS_DEVELOPMENT else f" ({COMMIT[:12]})")),
    ("", "", f"kproxy {SOURCES}"),
], ids=["release", "between releases", "no version", "neither"])
def test_the_image_is_built_with_the_given_version_and_commit(
    tmp_path: Path, version: str, commit: str, shown: str
) -> None:
    text = (CHECKOUT / "deploy" / "Containerfile").read_text()
    (command,) = re.findall(r"^ARG VERSION=\nARG COMMIT=\nRUN (.*)$", text, re.MULTILINE)
    sources = checkout(tmp_path)
    written = command.replace("/src/", f"{sources}/")
    subprocess.run(["sh", "-c", written], env={"VERSION": version, "COMMIT": commit}, check=True)
    wheel = build("wheel", sources)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, tmp_path / "installed"], check=True)
    program = "from kproxy_core.config.flags import version_text; print(version_text())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "installed", capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == shown


def test_the_page_about_deployment_tells_the_image_its_version_and_commit() -> None:
    page = (CHECKOUT / "docs" / "deploy.md").read_text()
    builds = re.findall(r"^podman build .*$", page, re.MULTILINE)
    assert len(builds) == 2
    for line in builds:
        assert "--build-arg VERSION=$VERSION --build-arg COMMIT=$(git rev-parse HEAD)" in line
