"""No file descriptors: every file, socket and program that kproxy opens fails with EMFILE."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from kproxy_conformance.open_files import open_files
from tests.shortage.node import MODES, node, vip


@contextmanager
def no_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """Let a process open *spare* more files at a time."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    gc.collect()  # Of this process, if that is meant: nothing is closed later.
    used = open_files(pid)
    free = (number for number in range(limits[0]) if number not in used)
    first_refused = next(islice(free, spare, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_refused, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("mode", MODES)
def test_changes_wait_for_descriptors_and_none_is_lost(tmp_path: Path, mode: str) -> None:
    with node(tmp_path, mode) as here:
        here.serve(1)
        with here.proxy() as proxy:
            here.await_answer(vip(1))
            with no_descriptors(proxy.pid):
                here.serve(2)
                here.await_log("Too many open files")
                assert not here.answers(vip(2))
                if mode != "userspace":  # its relays are the process
                    assert here.answers(vip(1))
            here.await_answer(vip(2))
            here.serve(3)
            here.await_answer(vip(3))
            assert here.answers(vip(1))
            proxy.await_health()
