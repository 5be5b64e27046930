"""Cgroups and BPF file systems that a test made, for programs that touch nothing else of the machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_ebpf.kernel.programs import Compilation, Compiled
from kproxy_ebpf.settings import Settings
from tests.core.bpf_places import new_bpf_file_system, new_cgroup
from tests.rights import require


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new cgroup without processes."""
    with new_cgroup() as made:
        yield made


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    """A directory in a new BPF file system."""
    with new_bpf_file_system(tmp_path / "bpf") as point:
        yield point / "kproxy"


@pytest.fixture
def settings(cgroup: Path, pins: Path) -> Settings:
    return Settings(cgroup=str(cgroup), pin_directory=str(pins))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The programs, compiled now: bcc makes their maps on the way."""
    require("BPF")
    return Compilation(str(tmp_path_factory.mktemp("cache"))).result()
