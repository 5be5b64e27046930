"""What tests need of the machine beyond Python. Each right is tried once, in the way in which tests use it.

A test that needs one which the machine refuses is left out, and the lanes say how many a right costs. In CI it
fails.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping

import pytest

from kproxy_conformance.network.rights import MissingRight

CI = "CI" in os.environ
"""Every right is there, so that no hole opens unnoticed."""

_TRIAL_TIMEOUT = 60.0
"""Seconds for one trial."""


def _command(*argv: str) -> str:
    """Return why *argv* fails; "" if it succeeds."""
    if shutil.which(argv[0]) is None:
        return f"{argv[0]} is not installed"
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=_TRIAL_TIMEOUT)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{argv[0]} does not end"
    lines = done.stderr.strip().splitlines() or [f"{argv[0]}: exit status {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _bpf() -> str:
    from kproxy_ebpf.kernel import bpf

    try:
        os.close(bpf.create_map("kproxy_test", bpf.MapDefinition(type=2, key=4, value=4, entries=1, flags=0)))
    except OSError as error:
        return error.strerror or str(error)
    return _command("unshare", "--mount", "mount", "-t", "bpf", "bpf", "/mnt")


_TRIALS: Mapping[str, Callable[[], str]] = {
    "network namespaces": lambda: _command("unshare", "--net", "true"),
    "mount namespaces": lambda: _command("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"),
    "process namespaces": lambda: _command("unshare", "--pid", "--fork", "--mount-proc", "true"),
    "other users": lambda: _command("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "true"),
    "BPF": _bpf,
}  # fmt: skip
"""Rights, and why each is missing; ""."""


@functools.cache
def missing(right: str) -> str:
    """Return why this process lacks *right*, "" if it has it."""
    return _TRIALS[right]()


def require(*rights: str) -> None:
    """Raises MissingRight for the first of *rights* that is missing."""
    for right in rights:
        if reason := missing(right):
            raise MissingRight(right, reason)


def needs(*rights: str) -> pytest.MarkDecorator:
    """Mark a test, or a module by ``pytestmark``, that needs *rights* which its fixtures do not try."""
    return pytest.mark.needs(*rights)


def wanted_by(item: pytest.Item) -> Iterator[str]:
    """Yield the rights in the marks of *item*."""
    for mark in item.iter_markers("needs"):
        yield from mark.args


def refused_in(error: BaseException | None) -> MissingRight | None:
    """Return the missing right behind *error*, if that is its cause."""
    while error is not None and not isinstance(error, MissingRight):
        error = error.__cause__ or error.__context__
    return error
