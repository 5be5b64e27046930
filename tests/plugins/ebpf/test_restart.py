"""Restarts and damage under load, through a whole kproxy."""

import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.names import ATTACH_TYPES, ON_THE_WAY_OUT
from tests.plugins.ebpf.node import REMOTE, Node, node, until
from tests.plugins.ebpf.sockets import Sockets

WEB, DNS = "10.96.0.10", "10.96.0.53"
EACH = 300
"""Connections at least between two events."""


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        made.serve("web", WEB, REMOTE)
        made.serve("dns", DNS, REMOTE, protocol="UDP")
        yield made


class Hammer:
    """Opens TCP connections and sends datagrams, one after another, until told to end."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._ended = threading.Event()
        self._progress = threading.Condition()
        self._made = 0
        self.failures: list[str] = []

    def run(self) -> None:
        with self._sockets.open(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            while not self._ended.is_set():
                with self._sockets.open(socket.AF_INET, socket.SOCK_STREAM) as client:
                    try:
                        client.connect((WEB, 80))
                        assert client.recv(100)
                        datagrams.sendto(b"now", (DNS, 80))
                        _, sender = datagrams.recvfrom(100)
                        assert sender == (DNS, 80), sender
                    except (OSError, AssertionError) as error:
                        self.failures.append(repr(error))
                with self._progress:
                    self._made += 1
                    self._progress.notify()

    def more(self, number: int = EACH) -> None:
        """Wait until so many more have been made."""
        with self._progress:
            wanted = self._made + number
            assert self._progress.wait_for(lambda: self._made >= wanted, 60)

    def end(self) -> None:
        self._ended.set()


@contextmanager
def hammering(sockets: Sockets) -> Iterator[Hammer]:
    hammer = Hammer(sockets)
    with ThreadPoolExecutor(1) as pool:
        running: Future[None] = pool.submit(hammer.run)
        try:
            yield hammer
        finally:
            hammer.end()
        running.result()


def attached(where: Node) -> dict[str, list[int]]:
    """Return the ids of the programs that run for sockets of the cgroup."""
    cgroup = os.open(where.cgroup, os.O_RDONLY)
    try:
        return {name: bpf.attached(cgroup, kind) for name, kind in ATTACH_TYPES.items()}
    finally:
        os.close(cgroup)


def test_no_connection_fails_while_the_proxy_is_killed_and_restarted(where: Node) -> None:
    with where.proxy() as proxy:
        with hammering(where.sockets(where.pod)) as hammer:
            for number in (signal.SIGKILL, signal.SIGTERM):
                hammer.more()
                before = attached(where)
                assert {len(ids) for ids in before.values()} == {1}
                proxy.end(number)
                hammer.more()
                assert attached(where) == before
                with where.proxy():
                    hammer.more()
            assert hammer.failures == []


def detach(where: Node) -> None:
    for name in ON_THE_WAY_OUT:
        (path,) = where.pins.glob(f"*/links/{name}")
        link = bpf.open_pin(str(path))
        bpf.detach_link(link)
        os.close(link)


def remove_links(where: Node) -> None:
    remove(next(where.pins.glob("*/links")))


def remove_maps(where: Node) -> None:
    remove(next(where.pins.glob("*/maps-*")))


def remove(directory: Path) -> None:
    """Remove *directory* at once: the proxy may pin objects while others are being removed."""
    removed = directory.with_name("removed")
    directory.rename(removed)
    shutil.rmtree(removed)


def pins(where: Node) -> set[str]:
    return {path.name for path in where.pins.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [detach, remove_links, remove_maps])
def test_damage_is_repaired_and_costs_no_connection(where: Node, damage: Callable[[Node], None]) -> None:
    with where.proxy(), hammering(where.sockets(where.pod)) as hammer:
        hammer.more()
        pinned = pins(where)
        for _ in range(2):  # the second time before the next look
            damage(where)
            until(lambda: {len(ids) for ids in attached(where).values()} == {1} and pins(where) == pinned)
        hammer.more()
        assert hammer.failures == []


def test_the_proxy_never_holds_the_compiler(where: Node) -> None:
    with where.proxy() as proxy:
        assert {len(ids) for ids in attached(where).values()} == {1}
        mapped = Path(f"/proc/{proxy.pid}/maps").read_text(encoding="utf-8")
        assert "python" in mapped
        assert not re.findall(r"/\S*(?:bcc|clang|LLVM)\S*", mapped)


def test_a_datagram_socket_keeps_its_endpoints_of_several_frontends(where: Node) -> None:
    """While no proxy runs after a SIGKILL, with the next one, and where one endpoint was removed."""
    frontends = {f"10.96.0.{61 + number}": REMOTE[number + 1] for number in range(4)}
    first = next(iter(frontends))
    for address, endpoint in frontends.items():
        where.serve(f"dns-{address[-1]}", address, [endpoint], protocol="UDP")
    where.serve("dns-1", first, REMOTE[:2], protocol="UDP")

    def ask(client: socket.socket) -> dict[str, str]:
        answers = {}
        for address in frontends:
            client.sendto(b"now", (address, 80))
            answer, sender = client.recvfrom(100)
            assert sender == (address, 80)
            answers[address] = answer.split()[0].decode()
        return answers

    with where.sockets(where.pod).open(socket.AF_INET, socket.SOCK_DGRAM) as client:
        with where.proxy() as proxy:
            before = ask(client)
            proxy.end(signal.SIGKILL)
            assert ask(client) == before
        with where.proxy() as proxy:
            assert ask(client) == before
            (left,) = {*REMOTE[:2]} - {before[first]}
            where.serve("dns-1", first, [left], protocol="UDP")
            where.await_endpoints(first, left)
            proxy.end(signal.SIGKILL)
        with where.proxy():
            assert ask(client) == before | {first: left}
