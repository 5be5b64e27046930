"""Running programs of the node: ipset, iptables and modprobe."""

import os
import shutil
import subprocess

from kproxy_core.backend.errors import SyncFailed

_LONGEST_RUN = 120
"""Seconds after which a program that hangs is ended."""

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def find(name: str) -> str | None:
    """The path of a program, also where PATH leaves out what only root needs."""
    return shutil.which(name, path=_PATH)


def run(*argv: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program to its end. Raises SyncFailed if it can't be started or hangs."""
    try:
        return subprocess.run(
            [find(argv[0]) or argv[0], *argv[1:]],
            input=stdin, capture_output=True, text=True, errors="replace", timeout=_LONGEST_RUN, check=False,
        )  # fmt: skip
    except OSError as error:
        raise SyncFailed(f"{argv[0]} can't be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SyncFailed(f"{argv[0]} has not ended after {_LONGEST_RUN} s") from error


def succeed(*argv: str, stdin: str = "") -> str:
    """What a program prints. Raises SyncFailed with its complaint if it fails."""
    done = run(*argv, stdin=stdin)
    if done.returncode:
        raise SyncFailed(f"{argv[0]}: exit {done.returncode}: {' '.join(done.stderr.split())}")
    return done.stdout
