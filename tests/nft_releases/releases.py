"""The releases of nft that write and read our tables: Debian 12's, which the image has, and Debian 13's.

`unpack` beside this file gets the one that is not installed here; `make test` runs it before all tests.
"""

import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kproxy_conformance.network.rights import MissingRight

UNPACK = Path(__file__).with_name("unpack")
TIMEOUT = 30.0
"""Seconds for one run of a program."""

_MACHINE = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
"""The network namespace for downloads: tests ask for a release in namespaces of their own."""


@dataclass(frozen=True)
class Release:
    """The programs of one release of Debian, which run in the network namespace of the calling thread."""

    version: str
    """Of nft."""
    suite: str

    @cached_property
    def programs(self) -> Path:
        """The directory with `nft` and `python3`, which finds the binding `nftables` of this release."""
        enter = ("nsenter", f"--net=/proc/{os.getpid()}/fd/{_MACHINE}")
        done = subprocess.run([*enter, UNPACK, self.suite], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingRight(f"nft of {self.suite}", done.stderr.strip().splitlines()[-1])
        return Path(done.stdout.strip())

    @property
    def nft(self) -> str:
        return str(self.programs / "nft")

    @property
    def iptables(self) -> str:
        """The program whose first argument is the name of one of iptables."""
        return str(self.programs / "xtables-nft-multi")

    @property
    def python(self) -> str:
        return str(self.programs / "python3")

    def run(self, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run nft; a negative exit status is the signal that ended it."""
        return self._run(self.nft, *arguments, stdin=stdin)

    def run_python(self, script: str, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run *script* by the release's Python, which may import `nftables`."""
        return self._run(self.python, "-c", script, *arguments, stdin=stdin)

    @staticmethod
    def _run(*command: str, stdin: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=TIMEOUT)

    def __str__(self) -> str:
        return f"nft-{self.version}"


BOOKWORM = Release("1.0.6", "bookworm")
TRIXIE = Release("1.1.3", "trixie")
RELEASES = (BOOKWORM, TRIXIE)
