"""What a machine or a container may refuse to tests and to the demo. Each right is tried once."""

import functools
import shutil
import subprocess
from collections.abc import Mapping

_TRIAL_TIMEOUT = 60.0
"""Seconds for one trial."""

_TRIALS: Mapping[str, tuple[str, ...]] = {
    "network namespaces": ("unshare", "--net", "true"),
    "mount namespaces": ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"),
    "process namespaces": ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"),
    "user namespaces": ("unshare", "--user", "--map-root-user", "--net", "true"),
    "other users": ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "true"),
    "BPF file systems": ("unshare", "--mount", "mount", "-t", "bpf", "bpf", "/mnt"),
}  # fmt: skip
"""A command for each right, which succeeds with it and leaves nothing."""


class MissingRight(PermissionError):
    """This process may not do what a test needs, as a trial showed: the test says nothing about kproxy."""

    def __init__(self, right: str, reason: str) -> None:
        """*right* is a noun, such as ``network namespaces``."""
        super().__init__(f"needs {right}: {reason}")
        self.right = right
        self.reason = reason


@functools.cache
def missing(right: str) -> str:
    """Return why this process lacks *right*, "" if it has it."""
    argv = _TRIALS[right]
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
