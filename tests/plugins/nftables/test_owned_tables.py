"""Tables that only kproxy can change, which outlive it: real processes, in a namespace of their own."""

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.core.processes import KPROXY
from tests.patience import PATIENCE
from tests.shortage.node import Node, node, vip

FLUSHES = 100
PACE = 1 / 500
"""Seconds from one connection to the next."""


@pytest.fixture(params=["auto"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "nftables", own_tables=request.param) as made:
        made.serve(1)
        yield made


def nft(here: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run nft on the node; it may fail."""
    return subprocess.run(
        ["ip", "netns", "exec", here.network.name, "nft", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def table(here: Node) -> str:
    return nft(here, "list", "table", "ip", "kproxy").stdout


def first_operations(here: Node) -> int:
    """Return the operations of the latest first sync of IPv4."""
    line = [line for line in here.logged.splitlines() if "first sync ip_family=IPv4" in line][-1]
    return int(line.partition("operations=")[2].split()[0])


class Clients:
    """Opens connections to a Service all the time."""

    def __init__(self) -> None:
        self.opened = 0
        self.failed: list[OSError] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(PACE):
            try:
                with socket.create_connection((vip(1), 80), PATIENCE) as client:
                    client.settimeout(PATIENCE)
                    assert client.recv(1) == b"!"
                self.opened += 1
            except OSError as error:
                self.failed.append(error)

    def end(self) -> None:
        self._ended.set()


@contextmanager
def connecting(here: Node) -> Iterator[Clients]:
    """Open connections meanwhile; yields once some were opened."""
    clients = Clients()
    threads = [
        threading.Thread(target=here.network.inside, args=[clients.run], daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        await_more(clients)
        yield clients
        await_more(clients)
    finally:
        clients.end()
        for thread in threads:
            thread.join()


def await_more(clients: Clients) -> None:
    before = clients.opened
    while clients.opened < before + 20 and not clients.failed:
        time.sleep(0.01)


def test_no_connection_fails_while_others_flush_the_ruleset(here: Node) -> None:
    with here.proxy() as proxy:
        here.await_answer(vip(1))
        with connecting(here) as clients:
            for _ in range(FLUSHES):
                assert nft(here, "flush", "ruleset").returncode == 0
        assert clients.failed == []
        assert "repaired foreign changes" not in here.logged
        here.serve(2)
        here.await_answer(vip(2))
        assert proxy.end()[0] == 0


def test_other_processes_cannot_change_the_table(here: Node) -> None:
    with here.proxy():
        for change in ("delete table", "flush table"):
            assert "Operation not permitted" in nft(here, *change.split(), "ip", "kproxy").stderr
        assert here.answers(vip(1))


@pytest.mark.parametrize("here", ["never"], indirect=True)
def test_without_an_owner_any_process_can_change_the_table_which_is_repaired(here: Node) -> None:
    with here.proxy():
        assert "flags" not in table(here).partition("map")[0]
        assert nft(here, "flush", "ruleset").returncode == 0
        here.await_log("repaired foreign changes")
        here.await_answer(vip(1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_table_outlives_its_owner_and_the_next_process_claims_it(here: Node, number: int) -> None:
    with here.proxy() as proxy:
        here.await_answer(vip(1))
        with connecting(here) as clients:
            proxy.end(number)
            assert "owner" not in table(here).partition("comment")[0]
            with here.proxy():
                assert nft(here, "flush", "ruleset").returncode == 0
                await_more(clients)
        assert clients.failed == []
    assert first_operations(here) == 0


def test_a_clean_up_beside_a_serving_process_names_the_owner(here: Node) -> None:
    clean_up = ["nsenter", f"--net=/run/netns/{here.network.name}", KPROXY, "--cleanup"]
    with here.proxy() as proxy:
        done = subprocess.run(clean_up, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"table ip kproxy is owned by another process, kproxy[{proxy.pid}]" in done.stderr
        assert here.answers(vip(1))
        proxy.end()
    here.command("--cleanup")
    assert nft(here, "list", "tables").stdout == ""


def test_a_table_without_an_owner_is_replaced_and_back(here: Node) -> None:
    with here.proxy():
        here.await_answer(vip(1))
    with connecting(here) as clients:
        for own_tables, is_owned in (("never", False), ("auto", True)):
            here.configure(own_tables)
            with here.proxy():
                await_more(clients)
                assert ("owner" in table(here).partition("map")[0]) is is_owned
    assert clients.failed == []
    assert here.logged.count("replacing table of another layout") == 4  # two of each family


def test_modes_are_switched_where_the_table_is_owned(here: Node) -> None:
    with here.proxy(), connecting(here) as clients:
        for mode in ("iptables", "userspace"):
            here.command("switch", mode)
            here.await_true(lambda: not table(here), "end of the table")
            here.command("switch", "nftables")
        assert "owner" in table(here).partition("map")[0]
    assert clients.failed == []
