"""The xtables lock, which every program that writes legacy iptables rules takes, held by another one."""

import fcntl
from pathlib import Path

import pytest

from tests.shortage.node import node, vip


@pytest.mark.parametrize("mode", ["iptables", "userspace"])
def test_changes_wait_for_the_lock_and_none_is_lost(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "xtables.lock"
    with node(tmp_path, mode) as here:
        for program in ("iptables-legacy", "ip6tables-legacy"):
            here.network.run(program, "-w", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
        here.serve(1)
        with here.proxy(environment={"XTABLES_LOCKFILE": str(path)}) as proxy:
            here.await_answer(vip(1))
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                here.serve(2)
                here.await_log("sync failed.*xtables lock")
                assert here.answers(vip(1))
                assert not here.answers(vip(2))
                assert "xtables lock" in proxy.health()[1]
            here.await_answer(vip(2))
            proxy.await_health()
            assert vip(2) in here.network.run("iptables-legacy-save", "-t", "nat")
