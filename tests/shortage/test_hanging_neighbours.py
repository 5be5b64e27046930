"""Others that hang, or never read what they are sent: the change of a Service takes effect meanwhile."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kproxy_core.app import control
from tests.core.processes import HEALTH
from tests.shortage.node import MODES, Node, node, vip

SERVED_AT_ONCE = 16
"""Clients of the control socket."""
MANY = 40


def unread_log(here: Node, stack: ExitStack) -> None:
    """Fill the pipe that standard error is."""
    filler = os.open(here.directory / "standard-error", os.O_WRONLY | os.O_NONBLOCK)
    stack.callback(os.close, filler)
    with suppress(BlockingIOError):
        while True:
            os.write(filler, bytes(1))


def silent_control_clients(here: Node, stack: ExitStack) -> None:
    ask(here, stack, b"")


def control_clients_that_never_read(here: Node, stack: ExitStack) -> None:
    ask(here, stack, b'{"command": "report"}\n')


def ask(here: Node, stack: ExitStack, request: bytes) -> None:
    """Take all places of the control socket, and read no answer."""
    (name,) = here.network.inside(lambda: list(control._names()))
    for _ in range(SERVED_AT_ONCE):
        client = stack.enter_context(here.network.inside(lambda: socket.socket(socket.AF_UNIX)))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect("\0" + name)
        client.sendall(request)


def http_clients_that_never_read(here: Node, stack: ExitStack) -> None:
    for port, path in ((10249, "/metrics"), (HEALTH, "/healthz")):
        for _ in range(MANY):
            client = stack.enter_context(here.dial("127.0.0.1", port))
            client.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):  # kproxy ends connections after a while
                while client.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 100):
                    """Ask until there is no more room."""


def service_manager_that_never_reads(here: Node, stack: ExitStack) -> None:
    """Fill the queue of the socket that systemd would read."""
    client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    client.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            client.sendto(b"STATUS=", str(here.directory / "notify"))


@pytest.mark.parametrize(("mode", "hang"), [
    *((mode, unread_log) for mode in MODES),
    *(("nftables", hang) for hang in (
        silent_control_clients, control_clients_that_never_read, http_clients_that_never_read,
        service_manager_that_never_reads)),
])
def test_changes_take_effect_while_others_hang(
    tmp_path: Path, mode: str, hang: Callable[[Node, ExitStack], None]
) -> None:
    log, notify = tmp_path / "standard-error", tmp_path / "notify"
    os.mkfifo(log)
    with node(tmp_path, mode) as here, ExitStack() as stack:
        stack.callback(os.close, os.open(log, os.O_RDONLY | os.O_NONBLOCK))
        manager = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        manager.bind(str(notify))
        here.serve(0)
        under = ["sh", "-c", f'exec "$@" 2>{log}', "sh"]
        environment = {"NOTIFY_SOCKET": str(notify), "WATCHDOG_USEC": "200000"}
        with here.proxy("-v4", under=under, environment=environment) as proxy:
            hang(here, stack)
            for number in range(1, 5):
                here.serve(number)
                here.await_answer(vip(number))
            assert proxy.end()[0] == 0
