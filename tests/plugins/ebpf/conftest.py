"""Cgroups and BPF file systems that a test made, for programs that touch nothing else of the machine."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_ebpf.kernel.mounts import mount_bpf_file_system
from kproxy_ebpf.kernel.programs import Compilation, Compiled
from kproxy_ebpf.settings import Settings

_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def cgroup2_tree() -> Path:
    """Return where the cgroup2 tree is mounted."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return Path(next(line.split()[1] for line in lines if line.split()[2] == "cgroup2"))


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new cgroup without processes."""
    made = cgroup2_tree() / f"kpt-{os.getpid()}-{next(_numbers)}"
    made.mkdir()
    yield made
    made.rmdir()


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    """A directory in a new BPF file system."""
    point = tmp_path / "bpf"
    point.mkdir()
    mount_bpf_file_system(str(point))
    yield point / "kproxy"
    assert _libc.umount2(os.fsencode(point), 2) == 0


@pytest.fixture
def settings(cgroup: Path, pins: Path) -> Settings:
    return Settings(cgroup=str(cgroup), pin_directory=str(pins))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The programs, compiled now."""
    return Compilation(str(tmp_path_factory.mktemp("cache"))).result()
