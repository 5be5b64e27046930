"""A cgroup and a BPF file system of a test's own, so that programs touch nothing else of the machine."""

import ctypes
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.processes import own_name
from tests.patience import PATIENCE
from tests.rights import require

_DETACH = 2
"""MNT_DETACH"""
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def cgroup2_tree() -> Path:
    """Return where the cgroup2 tree is mounted."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return Path(next(line.split()[1] for line in lines if line.split()[2] == "cgroup2"))


@contextmanager
def new_cgroup() -> Iterator[Path]:
    """Yield a new child of the root cgroup, without processes. They have ended when the context is left."""
    made = cgroup2_tree() / f"{own_name('cgroup')}-{next(_numbers)}"
    try:
        made.mkdir()
    except OSError as error:
        raise MissingRight("cgroups", error.strerror or str(error)) from error
    try:
        yield made
    finally:
        deadline = time.monotonic() + PATIENCE
        # A process that is ending still keeps the cgroup, though it is not listed any more.
        while _is_populated(made) and time.monotonic() < deadline:
            time.sleep(0.01)
        made.rmdir()


def _is_populated(cgroup: Path) -> bool:
    return "populated 1" in (cgroup / "cgroup.events").read_text()


@contextmanager
def new_bpf_file_system(point: Path) -> Iterator[Path]:
    """Mount a BPF file system at the new directory *point*."""
    require("BPF")
    point.mkdir()
    if _libc.mount(own_name("bpf").encode(), os.fsencode(point), b"bpf", 0, None):
        raise OSError(ctypes.get_errno(), f"no BPF file system at {point}")
    try:
        yield point
    finally:
        with suppress(FileNotFoundError):
            assert _libc.umount2(os.fsencode(point), _DETACH) == 0


@contextmanager
def confined(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield a new cgroup, and the flag that confines the programs of mode ebpf to it.

    At the root cgroup they would translate the connections of all tests that run meanwhile.
    """
    with new_cgroup() as cgroup, new_bpf_file_system(directory / "bpf") as pins:
        config = directory / "confined.json"
        config.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "kproxy": {"backendOptions": {
                "ebpf": {"cgroup": str(cgroup), "pinDirectory": str(pins / "kproxy")},
            }},
        }))  # fmt: skip
        yield cgroup, f"--config={config}"


def inside(cgroup: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs *command* in *cgroup*: sockets belong to it from the first one on."""
    return ["sh", "-c", f'echo $$ > {shlex.quote(str(cgroup))}/cgroup.procs && exec "$@"', "sh", *command]
