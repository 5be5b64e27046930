"""Reports of damage to programs: one for each damage, even if it is done again between two looks."""

import threading

import pytest

from kproxy_core.model.address import Family
from kproxy_ebpf.watch import Look, Watcher


@pytest.mark.parametrize(("looks", "reports"), [
    ([(1, ""), (1, "unpinned"), (1, "unpinned"), (1, "unpinned")], ["unpinned"]),
    ([(1, "unpinned"), (2, ""), (2, "unpinned")], ["unpinned"] * 2),
    ([(1, "unpinned"), (2, "unpinned"), (2, "unpinned")], ["unpinned"] * 2),
    ([(1, "unpinned"), (1, "detached")], ["unpinned", "detached"]),
    ([(1, ""), (2, "")], []),
])  # fmt: skip
def test_a_problem_is_reported_again_after_a_repair(looks: list[Look], reports: list[str]) -> None:
    remaining, ended = iter(looks), threading.Event()
    found: list[str] = []

    def look() -> Look:
        if (seen := next(remaining, None)) is None:
            ended.set()
            return looks[-1]
        return seen

    watcher = Watcher(
        look, [Family.IPV4], lambda family, problem: found.append(problem), interval=0.001)
    assert ended.wait(120)
    watcher.close()
    assert found == reports
