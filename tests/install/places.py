"""Where kproxy gets installed: virtual environments that do not see the packages of the distribution."""

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.install.debian import TIMEOUT, Debian, debian
from tests.rights import download

CHECKOUT = Path(__file__).parents[2]
BINDING, ELSEWHERE = "/usr/lib/python3/dist-packages/nftables", "/opt/nftables"
"""The package of python3-nftables, and where it is as long as it counts as not installed."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kproxy"


@dataclass(frozen=True)
class Place:
    """A virtual environment in which kproxy and what it needs are installed, and nothing else."""

    system: Debian | None
    """None: this machine."""
    programs: str
    """The directory with ``kproxy``."""

    def command(self, *command: str) -> list[str]:
        """Return *command* as one of this machine, in the environment of a fresh login."""
        if self.system is not None:
            return self.system.command(*command)
        return ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", *command]

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*command), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=TIMEOUT)

    def kproxy(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run(f"{self.programs}/kproxy", *arguments)

    def put(self, path: Path) -> str:
        """Make *path* of this machine visible, and return its path there."""
        return str(path) if self.system is None else self.system.put(path)


def dependencies(python: str) -> Path:
    """Return a directory with the wheels that the base installation needs, for version *python* ("3.11").

    They are those that the image has, and are downloaded once.
    """
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    pinned = (CHECKOUT / "deploy" / "requirements.txt").read_text()
    wanted = "\n".join(
        found[0] for name in names for found in re.finditer(rf"^{name}==(.*\\\n)+.*$", pinned, re.MULTILINE))
    kept = _CACHE / f"wheels-{python}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    if not kept.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}")
        scratch.mkdir()
        (scratch / "requirements.txt").write_text(wanted)
        machine = os.uname().machine
        platforms = [f"--platform={name}_{machine}" for name in ("manylinux2014", "manylinux_2_28")]
        try:
            download(scratch, "--only-binary=:all:", f"--python-version={python}", *platforms,
                     f"--requirement={scratch / 'requirements.txt'}")  # fmt: skip
            scratch.rename(kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return kept


def _offline(wheels: str) -> list[str]:
    return ["install", "--quiet", "--no-index", f"--find-links={wheels}"]


@contextmanager
def on_this_machine(built: Path, directory: Path) -> Iterator[Place]:
    """Install *built*, a wheel, in a virtual environment of the distribution's Python."""
    place = Place(None, str(directory / "venv" / "bin"))
    version = "import sys; print('{}.{}'.format(*sys.version_info))"
    wheels = dependencies(place.run("/usr/bin/python3", "-c", version).stdout.strip())
    for command in (["/usr/bin/python3", "-m", "venv", str(directory / "venv")],
                    [f"{place.programs}/pip", *_offline(str(wheels)), str(built)]):
        done = place.run(*command)
        assert done.returncode == 0, done.stderr
    yield place


@contextmanager
def on_debian(built: Path, directory: Path, *, suite: str, python: str, own_python: bool) -> Iterator[Place]:
    """Install *built* on *suite* of Debian or Ubuntu, as if nobody had installed python3-nftables.

    *python*: the version. With *own_python*, by the release's Python and pip. Else in an environment of a
    Python that is not the release's and without a pip of its own, as pipx and uv make it.
    """
    directory.mkdir()
    with debian(suite, directory) as system:
        place = Place(system, "/opt/kproxy/bin")
        wheels = place.put(dependencies(python))
        install = [*_offline(wheels), place.put(built)]
        commands = [
            ["python3", "-m", "venv", "/opt/kproxy"],
            ["/opt/kproxy/bin/pip", *install],
        ] if own_python else [
            ["python3", "-m", "venv", "/opt/pip"],
            ["/opt/python3.11/bin/python3.11", "-m", "venv", "--without-pip", "/opt/kproxy"],
            ["/opt/pip/bin/pip", "--python", "/opt/kproxy/bin/python", *install],
        ]  # fmt: skip
        for command in (["mv", BINDING, ELSEWHERE], *commands):
            done = place.run(*command)
            assert done.returncode == 0, done.stderr
        yield place
