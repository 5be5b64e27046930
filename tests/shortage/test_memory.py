"""A memory limit that ends a process: the rules serve on, and the next process goes on where it was."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kproxy_conformance.processes import children
from tests.patience import PATIENCE
from tests.shortage.node import MODES, node, vip

_LIMITS = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
_USAGES = {"cgroup": "memory.usage_in_bytes", "cgroup2": "memory.current"}


class MemoryGroup:
    """A cgroup of the memory controller, of either version."""

    def __init__(self, path: Path, version: str) -> None:
        self._path = path
        self._version = version

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def limit(self, size: int) -> None:
        (self._path / _LIMITS[self._version]).write_text(str(size))

    def usage(self) -> int:
        return int((self._path / _USAGES[self._version]).read_text())


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    version, tree = _memory_controller()
    path = tree / name
    path.mkdir()
    try:
        yield MemoryGroup(path, version)
    finally:
        deadline = time.monotonic() + PATIENCE
        while (path / "cgroup.procs").read_text():
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.05)
        path.rmdir()


def _memory_controller() -> tuple[str, Path]:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, point, kind, options, *_ in mounts:
        if kind == "cgroup" and "memory" in options.split(","):
            return kind, Path(point)
    for _, point, kind, *_ in mounts:
        if kind == "cgroup2" and "memory" in Path(point, "cgroup.subtree_control").read_text().split():
            return kind, Path(point)
    raise AssertionError("no memory controller")


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_process_loses_nothing(tmp_path: Path, mode: str) -> None:
    with node(tmp_path, mode) as here, memory_group(f"kproxy-{os.getpid()}") as group:
        here.serve(1)
        with here.proxy() as proxy:
            group.add(proxy.pid)
            group.limit(group.usage() + (6 << 20))
            here.serve_many(2, 4000)
            assert proxy.ended()[0] == -signal.SIGKILL
        if mode != "userspace":
            assert here.answers(vip(1))
        with here.proxy() as proxy:
            here.await_answer(vip(4001))
            assert here.answers(vip(1))


def test_a_killed_relay_worker_is_named_and_replaced(tmp_path: Path) -> None:
    with node(tmp_path, "userspace") as here, memory_group(f"kproxy-{os.getpid()}") as group:
        here.serve(1)
        with here.proxy() as proxy:
            here.await_answer(vip(1))
            workers = children(proxy.pid)
            for worker in workers:
                group.add(worker)
            group.limit(os.sysconf("SC_PAGE_SIZE"))
            with ExitStack() as clients:

                def worker_exited() -> bool:
                    with suppress(OSError):  # some end with their worker
                        clients.enter_context(here.dial(vip(1)))
                    return "relay worker exited" in here.logged

                here.await_true(worker_exited, "killed worker")
            named = re.findall(r"relay worker exited.* pid=(\d+)", here.logged)
            assert named
            assert {int(pid) for pid in named} <= set(workers)
            here.await_answer(vip(1))
            proxy.await_health()
