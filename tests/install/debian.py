"""Debian or Ubuntu as after its installation, for tests that install kproxy: their changes are discarded.

`debian` beside this file makes the root file system, once on a machine.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kproxy_conformance.network.rights import MissingRight

MAKE = Path(__file__).with_name("debian")
TIMEOUT = 300.0
"""Seconds for one run of a program."""

_ENTER = """
mount -t tmpfs tmpfs "$2"
mkdir "$2/changes" "$2/work" "$2/root"
mount -t overlay -o "lowerdir=$1,upperdir=$2/changes,workdir=$2/work" overlay "$2/root"
mount -t proc proc "$2/root/proc"
for at in sys dev; do mount --rbind "/$at" "$2/root/$at"; done
for at in run tmp; do mount -t tmpfs tmpfs "$2/root/$at"; done
exec chroot "$2/root" sh -c 'echo; exec cat'
"""


class Debian:
    """One release, in a mount namespace of its own. Its processes are in the network of their caller."""

    def __init__(self, holder: int) -> None:
        self._holder = holder

    def command(self, *command: str) -> list[str]:
        """Return *command* as one of this machine, for instance behind ``ip netns exec``."""
        root = f"/proc/{self._holder}/root"
        enter = ["nsenter", f"--target={self._holder}", "--mount", f"--root={root}", f"--wd={root}"]
        return [*enter, "env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", *command]

    def run(self, *command: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*command), input=stdin, capture_output=True, text=True, check=False, timeout=TIMEOUT)

    def put(self, path: Path, directory: str = "/tmp") -> str:
        """Copy a file or directory of this machine to *directory*, and return its path there."""
        to = Path(f"/proc/{self._holder}/root{directory}") / path.name
        if path.is_dir():
            shutil.copytree(path, to)
        else:
            shutil.copy(path, to)
        return f"{directory}/{path.name}"


def release(suite: str) -> str:
    """Return the directory with the root file system of *suite*."""
    made = subprocess.run([MAKE, suite], capture_output=True, text=True, check=False)
    if made.returncode:
        raise MissingRight(f"a root file system of {suite}", made.stderr.strip().splitlines()[-1])
    return made.stdout.strip()


@contextmanager
def debian(suite: str, directory: Path) -> Iterator[Debian]:
    """Yield the release *suite*. Its changes are in memory, mounted at *directory* for its processes only."""
    command = ["unshare", "--mount", "--propagation=private", "sh", "-euc", _ENTER, "sh", release(suite),
               str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n", "its file systems could not be mounted"
        try:
            yield Debian(holder.pid)
        finally:
            holder.stdin.close()  # which ends it, and with it the namespace
