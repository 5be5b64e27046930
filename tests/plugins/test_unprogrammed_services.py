"""A Service that a backend fails to program: all others are served, and it is once it can be."""

from pathlib import Path

import pytest

from tests.shortage.node import node, vip

_PICKY = '''
import os
from kproxy_core.contract import Scope
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.hooks import hookimpl

@hookimpl(wrapper=True, tryfirst=True)
def kproxy_sync(update):
    asked = update.plans if update.scope is Scope.RESYNC else update.changed
    bad = [key for key in asked if key.name == "web-2" and asked[key] is not None]
    if bad and os.path.exists({planted!r}):
        raise {failure}
    return (yield)
'''
"""A plugin because of which one Service fails while a file exists."""
FAILURES = {
    "unexpected": 'KeyError("planted")',
    "refused": 'SyncFailed("planted")',
    "named": 'SyncFailed("planted", service_ports=bad)',
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("mode", ["nftables", "iptables", "userspace"])
def test_others_are_served_and_this_one_once_it_can_be(mode: str, failure: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "picky.py").write_text(_PICKY.format(planted=str(planted), failure=FAILURES[failure]))
    with node(tmp_path, mode) as here:
        here.serve(1)
        with here.proxy("-p", "picky", environment={"PYTHONPATH": str(tmp_path)}) as proxy:
            planted.touch()
            here.serve(2)
            here.serve(3)
            here.await_answer(vip(3))
            assert here.answers(vip(1))
            assert not here.answers(vip(2))
            here.await_log("service ports are not served.*shop/web-2.*planted")
            assert "not served: shop/web-2" in proxy.health()[1]
            here.serve(4)
            here.await_answer(vip(4))
            planted.unlink()
            here.await_answer(vip(2))
            here.await_log("all service ports are served again")


def test_a_restart_serves_others_where_the_backend_itself_fails(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "picky.py").write_text(_PICKY.format(planted=str(planted), failure=FAILURES["unexpected"]))
    with node(tmp_path, "nftables") as here:
        for number in (1, 2, 3):
            here.serve(number)
        with here.proxy():
            here.await_answer(vip(2))
        planted.touch()
        with here.proxy("-p", "picky", environment={"PYTHONPATH": str(tmp_path)}):
            here.serve(4)
            here.await_answer(vip(4))
            assert here.answers(vip(1))
            assert here.answers(vip(3))
