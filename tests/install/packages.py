"""A release of this checkout, made once for all tests that install kproxy; and a newer package for Debian."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import evidence, release
from kproxy_core.config.release import SOURCES
from tests.deploy.test_packages import committed

IS_RELEASED = ".dev" not in SOURCES
VERSION = re.sub(r"\.(\d+)\.\d+$", lambda found: f".{int(found[1]) + 1}.0", SOURCES) if IS_RELEASED else (
    SOURCES.removesuffix(".dev0"))
"""The version of the release: what this checkout becomes."""
NEWER = "99.0"
"""The version of the newer package."""
_IN = "usr/lib/kproxy/lib/python3/site-packages/kproxy_core/VERSION"
_IDENTITY = {f"GIT_{who}_{what}": "nobody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@dataclass(frozen=True)
class Release:
    """A copy of this checkout, and the files of the release that was made from it."""

    root: Path
    key: Path
    printed: str = ""

    @property
    def files(self) -> Path:
        return self.root / "dist" / f"kproxy-{VERSION}"

    @property
    def notes(self) -> str:
        return (self.files / f"kproxy-{VERSION}-notes.md").read_text(encoding="utf-8")

    @property
    def commits(self) -> list[str]:
        """The commits that it printed: that of the release and the next."""
        return re.findall(r"(?: v\S+|--ff-only) ([0-9a-f]{12})$", self.printed, re.MULTILINE)

    def git(self, *words: str) -> str:
        return subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True, check=True,
                              env=os.environ | _IDENTITY).stdout.strip()

    def make(
        self, version: str, *options: str, key: Path | None = None, under: Sequence[str] = ()
    ) -> "subprocess.CompletedProcess[str]":
        """Make a release, as `make release` does. The package for Debian is not compressed."""
        command = [
            *under, sys.executable, "-m", "deploy.release", version, f"--key={key or self.key}", *options]
        return subprocess.run(
            command, cwd=self.root, env=os.environ | _IDENTITY | {"DPKG_DEB_COMPRESSOR_TYPE": "none"},
            capture_output=True, text=True, check=False)

    def cloned(self, directory: Path) -> "Release":
        self.git("clone", "--quiet", str(self.root), str(directory / "clone"))
        return Release(directory / "clone", self.key)

    def again(self, directory: Path, *under: str) -> "Release":
        """Make the release in a clone in *directory*. *under*: a command in front."""
        return self.cloned(directory).made(*under)

    def made(self, *under: str) -> "Release":
        done = self.make(VERSION, "--since=none", "--images=none", under=under)
        assert done.returncode == 0, done.stderr
        return Release(self.root, self.key, done.stdout)


def make_release(directory: Path) -> Release:
    """Make a release of this checkout with its changes, signed with a key that only *directory* has."""
    new = Release(directory / "checkout", directory / "key")
    committed(new.root)
    new.git("branch", "--move", "main")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", new.key], check=True)
    (new.root / evidence.SIGNERS).write_text(f"{evidence.signer(new.key)}\n")
    (new.root / "changelog.d").mkdir(exist_ok=True)
    (new.root / "changelog.d" / "of-a-test.added.md").write_text("A key that signs.\n")
    if IS_RELEASED:
        release.develop(new.root, SOURCES)
    new.git("add", "--all")
    new.git("commit", "--quiet", "--message=Add a key")
    return new.made()


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
