"""Commands that run a checkout of kproxy with compiled modules, as an installed one runs."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kproxy_conformance.processes import own_name

TOP = Path(__file__).resolve().parents[2]
_SOURCES = ("kproxy_core", "plugins", "bpf")


def program(top: Path = TOP) -> list[str]:
    """Return the command that runs the checkout *top* with the packages of this interpreter."""
    sources = [str(top / name) for name in _SOURCES if (top / name).is_dir()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *sources], check=True)
    path = ":".join([str(top), *sources[1:]])
    return ["env", f"PYTHONPATH={path}", str(Path(sys.executable).with_name("kproxy"))]


def command(top: Path = TOP) -> str:
    """Return the same for --proxy."""
    return " ".join([
        *program(top), "--mode={mode} --config {config} --master {master} --hostname-override {node}"])


@contextmanager
def revision(name: str) -> Iterator[Path]:
    """Check out the revision *name* of this repository into a temporary directory."""
    with tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory:
        top = Path(directory) / "checkout"
        subprocess.run(["git", "-C", TOP, "worktree", "add", "-q", "--detach", top, name], check=True)
        try:
            yield top
        finally:
            subprocess.run(["git", "-C", TOP, "worktree", "remove", "--force", top], check=True)
