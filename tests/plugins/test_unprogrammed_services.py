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


@pytest.mark.parametrize("failure", FAILURES)
def test_a_restart_serves_others(failure: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "picky.py").write_text(_PICKY.format(planted=str(planted), failure=FAILURES[failure]))
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
            here.await_log("service ports are not served.*shop/web-2.*planted")
            planted.unlink()
            here.await_answer(vip(2))


def test_a_takeover_removes_what_another_mode_has_left(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "picky.py").write_text(_PICKY.format(planted=str(planted), failure=FAILURES["unexpected"]))
    with node(tmp_path, "iptables") as here:
        for number in (1, 2, 3):
            here.serve(number)
        with here.proxy():
            here.await_answer(vip(2))
        planted.touch()
        here.configure(mode="nftables")
        with here.proxy("-p", "picky", environment={"PYTHONPATH": str(tmp_path)}):
            for number in (1, 3):
                assert here.answers(vip(number))
            assert not here.answers(vip(2))
            here.await_true(
                lambda: "KUBE-SVC" not in here.network.run("nft", "list", "ruleset"), "no leftovers")


_ENCODER = """
import os, struct
from kproxy_core.contract.hooks import hookimpl
from kproxy_nftables import applied
encode = applied.elements

@hookimpl
def kproxy_measure():
    return []

def elements(plan, *rest):
    if plan.key.name in {names!r} and os.path.exists({planted!r}):
        struct.pack("H", 1 << 16)
    return encode(plan, *rest)

applied.elements = elements
"""
"""A plugin with which nftables mode cannot encode some Services while a file exists."""


def test_a_repair_serves_others_and_what_is_deleted_is_forgotten(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    names = ["web-2", "web-3"]
    (tmp_path / "encoder.py").write_text(_ENCODER.format(planted=str(planted), names=names))
    with node(tmp_path, "nftables", own_tables="never") as here:
        for number in range(1, 7):
            here.serve(number)
        with here.proxy("-p", "encoder", environment={"PYTHONPATH": str(tmp_path)}) as proxy:
            here.await_answer(vip(2))
            planted.touch()
            here.network.nft("delete table ip kproxy")
            for number in (1, 4, 5, 6):
                here.await_answer(vip(number))
            here.await_log("service ports are not served.*service_ports=2 .*ushort format")
            metric = 'kproxy_unserved_service_ports{ip_family="IPv4"}'
            here.await_true(lambda: f"{metric} 2\n" in proxy.get(10249, "/metrics")[1], metric)
            here.delete(2)
            here.serve(7)
            here.await_answer(vip(7))
            here.await_true(lambda: f"{metric} 1\n" in proxy.get(10249, "/metrics")[1], metric)
            explained = here.command("explain", "node", vip(3) + ":80")
            assert "not served, or only in part" in explained
            planted.unlink()
            here.await_answer(vip(3))
            here.await_log("all service ports are served again")


def test_a_switch_to_a_mode_that_would_lose_a_service_is_rolled_back(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "picky.py").write_text(_PICKY.format(planted=str(planted), failure=FAILURES["unexpected"]))
    with node(tmp_path, "nftables") as here:
        here.serve(1)
        with here.proxy("-p", "picky", environment={"PYTHONPATH": str(tmp_path)}):
            planted.touch()
            here.serve(2)
            here.await_log("service ports are not served.*shop/web-2.*planted")
            with pytest.raises(AssertionError, match="planted"):
                here.command("switch", "iptables")
            assert "rolled back the switch" in here.logged
            assert "could not roll back" not in here.logged
            here.serve(3)
            here.await_answer(vip(3))
            assert here.answers(vip(1))
            planted.unlink()
            here.await_answer(vip(2))
            here.command("switch", "iptables")
            assert here.answers(vip(2))
