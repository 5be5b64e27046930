"""The seccomp profile in ipvs mode. `test_seccomp` runs these tests in a guest."""

import sys
from pathlib import Path

from tests.deploy import seccomp
from tests.deploy.objects import DEPLOY
from tests.shortage.node import node, vip


def test_ipvs_mode_needs_no_other_calls_once_its_modules_are_loaded(tmp_path: Path) -> None:
    confined: list[str | Path] = [sys.executable, seccomp.__file__, DEPLOY / "seccomp" / "kproxy.json"]
    with node(tmp_path, "ipvs") as here:
        here.command("--init-only", "--mode", "ipvs", "--manifests", str(tmp_path))
        here.serve(1)
        with here.proxy(under=confined) as proxy:
            here.await_answer(vip(1))
            here.serve(2)
            here.await_answer(vip(2))
            here.command("switch", "nftables", under=confined)
            here.command("switch", "ipvs", under=confined)
            assert here.answers(vip(1))
            assert proxy.end()[0] == 0
        here.command("--cleanup", under=confined)
        assert vip(1) not in here.network.run("nft", "list", "ruleset")
