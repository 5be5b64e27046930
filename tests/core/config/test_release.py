"""The version of a checkout, of a worktree, and of what is built from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kproxy_core.config import release

PROGRAM = "kproxy_core/config/release.py"
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(at: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", at, *IDENTITY, *words], check=True, capture_output=True, text=True,
        env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}).stdout.strip()  # fmt: skip


def sources(at: Path, version: str = "1.0.0.dev0") -> Path:
    """Write sources of *version* to the directory *at*."""
    text = Path(release.__file__).read_text(encoding="utf-8")
    (at / PROGRAM).parent.mkdir(parents=True)
    (at / PROGRAM).write_text(text.replace(f'SOURCES = "{release.SOURCES}"', f'SOURCES = "{version}"'))
    (at / ".gitignore").write_text("__pycache__/\n")
    (at / "kproxy_core" / "__init__.py").write_text("")
    (at / "kproxy_core" / "config" / "__init__.py").write_text("")
    return at


def repository(at: Path, version: str = "1.0.0.dev0", commits: int = 3) -> str:
    """Make a repository of sources of *version*; return the abbreviated commit."""
    git(sources(at, version), "init", "--quiet", "--initial-branch=main")
    git(at, "add", "--all")
    for _ in range(commits):
        git(at, "commit", "--quiet", "--allow-empty", "--message=A commit")
    return git(at, "rev-parse", "HEAD")[:12]


def shown(at: Path, path: str = "") -> str:
    """Return the version and commit that the code at *at* gives, with the programs in *path* only."""
    program = "from kproxy_core.config.release import version, commit; print(version(), commit())"
    done = subprocess.run([sys.executable, "-c", program], cwd=at, capture_output=True, text=True, check=True,
                          env={"PATH": path})
    return done.stdout.strip()


def built(at: Path) -> str:
    """Return the version of a package that is built at *at*."""
    done = subprocess.run([sys.executable, PROGRAM], cwd=at, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_between_releases_the_version_has_the_commit_and_what_is_built_the_count(tmp_path: Path) -> None:
    commit = repository(tmp_path)
    assert shown(tmp_path) == f"1.0.0.dev0+g{commit} {commit}"
    assert built(tmp_path) == f"1.0.0.dev3+g{commit}"
    (tmp_path / "a-file").touch()
    assert built(tmp_path) == f"1.0.0.dev3+g{commit}.dirty"


def test_a_release_is_its_number_unless_its_sources_were_changed(tmp_path: Path) -> None:
    commit = repository(tmp_path, "1.0.0")
    assert (shown(tmp_path), built(tmp_path)) == (f"1.0.0 {commit}", "1.0.0")
    (tmp_path / "a-file").touch()
    assert built(tmp_path) == f"1.0.0+g{commit}.dirty"


@pytest.mark.parametrize("how", ["a worktree", "no branch", "packed references"])
def test_the_commit_is_found_in(how: str, tmp_path: Path) -> None:
    at = tmp_path / "main"
    commit = repository(at)
    if how == "a worktree":
        git(at, "worktree", "add", "--quiet", "-b", "other", "../other")
        at = tmp_path / "other"
    elif how == "no branch":
        git(at, "checkout", "--quiet", "--detach")
    else:
        git(at, "pack-refs", "--all")
    assert shown(at) == f"1.0.0.dev0+g{commit} {commit}"
    assert built(at) == f"1.0.0.dev3+g{commit}"


def test_a_shallow_clone_does_not_count(tmp_path: Path) -> None:
    commit = repository(tmp_path / "all")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{tmp_path}/all", "last")
    assert built(tmp_path / "last") == f"1.0.0.dev0+g{commit}"


def test_what_was_recorded_counts_where_there_is_no_repository(tmp_path: Path) -> None:
    sources(tmp_path)
    assert (shown(tmp_path), built(tmp_path)) == ("1.0.0.dev0", "1.0.0.dev0")
    (tmp_path / "kproxy_core" / "VERSION").write_text("1.0.0.dev7+g0123456789ab 0123456789ab\n")
    assert shown(tmp_path) == "1.0.0.dev7+g0123456789ab 0123456789ab"
    assert built(tmp_path) == "1.0.0.dev7+g0123456789ab"


def test_no_start_runs_git(tmp_path: Path) -> None:
    commit = repository(tmp_path / "sources")
    log = tmp_path / "log"
    (tmp_path / "git").write_text(f"#!/bin/sh\necho run > {log}\n")
    (tmp_path / "git").chmod(0o755)
    assert commit in shown(tmp_path / "sources", str(tmp_path))
    assert not log.exists()


@pytest.mark.parametrize(("version", "commit", "text"), [
    ("1.0.0", "0123456789ab", "1.0.0 (0123456789ab)"),
    ("1.0.0", "", "1.0.0"),
    ("1.0.0.dev7+g0123456789ab", "0123456789ab", "1.0.0.dev7+g0123456789ab"),
])  # fmt: skip
def test_people_are_shown_the_commit_once(version: str, commit: str, text: str) -> None:
    assert release.described(version, commit) == text
