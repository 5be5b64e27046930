"""Connections while maps and programs are replaced. No rules serve here: each needs the programs."""

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract.errors import TrustLost
from kproxy_ebpf import names
from kproxy_ebpf.family import FamilyState
from kproxy_ebpf.kernel import bpf
from kproxy_ebpf.kernel.maps import Kernel
from kproxy_ebpf.kernel.programs import Compiled
from kproxy_ebpf.settings import Settings
from tests.core.namespaces import Namespace, namespace
from tests.plugins.ebpf.node import echo, until
from tests.plugins.ebpf.sockets import Sockets, sockets_in
from tests.shortage.test_descriptors import no_descriptors

VIP = "10.96.0.10"
SERVING = tuple(f"127.0.0.{number}" for number in range(2, 9))
NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")
EACH = 300
"""Connections at least between two events."""


@pytest.fixture
def client() -> Iterator[Namespace]:
    with namespace() as made:
        made.ip("link set lo up")
        yield made


@pytest.fixture
def sockets(client: Namespace, settings: Settings) -> Iterator[Sockets]:
    with echo(client, SERVING), sockets_in(client, Path(settings.cgroup)) as made:
        yield made


class Node:
    """A kernel with the programs, and its successors."""

    def __init__(self, settings: Settings, compiled: Compiled) -> None:
        self._settings = settings
        self._small = {name: compiled.maps[name]._replace(entries=2) for name in names.PER_FAMILY}
        self._compiled = compiled._replace(maps={**compiled.maps, **self._small})
        self._start()

    def _start(self) -> None:
        self._kernel = Kernel(self._settings)
        self._kernel.open(self._compiled)
        self._state = FamilyState(NODE.family, self._kernel)
        self.serve(2)
        self._kernel.attach()

    def serve(self, number: int) -> None:
        """Bring the maps to a Service with *number* endpoints."""
        self.serve_with(SERVING[:number])

    def serve_with(self, endpoints: Sequence[str]) -> None:
        update = full_update(NODE, plans(NODE, service(ip=VIP), endpoint_slice("web", *endpoints)))
        self._state.write(update, self._state.withdraw(update))

    def restart(self) -> None:
        self._kernel.close()
        self._start()

    def upgrade(self) -> None:
        """Start with programs that use other maps."""
        hash_, pins = 1, self._compiled.maps[names.PINS]
        other = {**self._compiled.maps, names.PINS: pins._replace(type=hash_)}
        self._compiled = self._compiled._replace(maps=other)
        self.restart()

    def grow(self) -> None:
        """Fill the maps beyond their size."""
        self.serve(len(SERVING))

    def problem(self) -> str:
        return self._kernel.problem()

    def repair(self) -> None:
        self._kernel.attach()

    def close(self) -> None:
        self._kernel.close()


@pytest.mark.parametrize("event", [Node.restart, Node.upgrade, Node.grow], ids=lambda event: event.__name__)
def test_no_connection_is_missed(
    settings: Settings, compiled: Compiled, sockets: Sockets, event: Callable[[Node], None]
) -> None:
    node, made, failures, ended = Node(settings, compiled), [0], list[str](), threading.Event()

    def connect() -> None:
        while not ended.is_set():
            with sockets.open(socket.AF_INET, socket.SOCK_STREAM) as one:
                try:
                    one.connect((VIP, 80))
                    made[0] += bool(one.recv(100))
                except OSError as error:
                    failures.append(str(error))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(connect)
        try:
            for number in range(1, 4):
                until(lambda number=number: made[0] >= number * EACH or bool(failures))  # type: ignore[misc]
                event(node)
            until(lambda: made[0] >= 4 * EACH or bool(failures))
        finally:
            ended.set()
        running.result()
    node.close()
    assert failures == []


def chosen(sockets: Sockets) -> set[str]:
    """Return the endpoints that answer 20 connections."""
    found = set()
    for _ in range(20):
        with sockets.open(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.connect((VIP, 80))
            found.add(one.recv(100).decode().split()[0])
    return found


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
def test_programs_read_what_is_written_after_a_map_could_not_grow(
    settings: Settings, compiled: Compiled, sockets: Sockets, spare: int
) -> None:
    """Where *spare* descriptors are left: for no map, for a map and no program, and for some programs."""
    node = Node(settings, compiled)
    try:
        with no_descriptors(os.getpid(), spare), pytest.raises(TrustLost, match="Too many open files"):
            node.serve(4)
        assert node.problem() == ""
        assert chosen(sockets) <= set(SERVING[:2])
        node.serve(4)
        node.serve_with(SERVING[5:])
        assert chosen(sockets) <= set(SERVING[5:])
        assert node.problem() == ""
    finally:
        node.close()


@pytest.mark.parametrize("refused", [1, 2, len(names.PROGRAMS)])
def test_a_map_does_not_grow_if_a_program_cannot_be_replaced(
    settings: Settings, compiled: Compiled, sockets: Sockets, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    node, real, calls = Node(settings, compiled), bpf.update_link, count(1)

    def update_link(link: int, program: int) -> None:
        if next(calls) == refused:
            raise OSError(errno.ENOMEM, "no memory")
        real(link, program)

    try:
        with monkeypatch.context() as now:
            now.setattr("kproxy_ebpf.kernel.bpf.update_link", update_link)
            with pytest.raises(TrustLost, match="no memory"):
                node.grow()
        assert node.problem() == ""
        assert chosen(sockets) <= set(SERVING[:2])
        node.serve_with(SERVING[5:])
        assert chosen(sockets) <= set(SERVING[5:])
    finally:
        node.close()


def remove_pins(settings: Settings) -> None:
    shutil.rmtree(settings.pin_directory)


def detach(settings: Settings) -> None:
    (path,) = Path(settings.pin_directory).glob("*/links/connect4")
    link = bpf.open_pin(str(path))
    bpf.detach_link(link)
    os.close(link)


@pytest.mark.parametrize("damage", [remove_pins, detach])
def test_a_map_grows_where_another_process_did_damage(
    settings: Settings, compiled: Compiled, sockets: Sockets, damage: Callable[[Settings], None]
) -> None:
    node = Node(settings, compiled)
    try:
        damage(settings)
        node.grow()
        assert node.problem() != ""
        node.repair()
        assert node.problem() == ""
        node.serve_with(SERVING[5:])
        assert chosen(sockets) <= set(SERVING[5:])
    finally:
        node.close()
