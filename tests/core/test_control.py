"""The socket of a running proxy, in a network namespace of the test's own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kproxy_core.modes import control
from kproxy_core.modes.control import ControlServer, NobodyThere, Refused


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """One that no proxy on this machine has."""
    own = b"\0kproxy/test-%d" % os.getpid()
    monkeypatch.setattr(control, "ADDRESS", own)
    return own


def answer(request: Mapping[str, Any], tell: Callable[[str], None]) -> Mapping[str, Any]:
    if request.get("do") != "count":
        raise Refused("no such request")
    for number in range(int(request["to"])):
        tell(str(number))
    return {"counted": request["to"]}


@pytest.fixture
def server(address: bytes) -> Iterator[ControlServer]:
    server = ControlServer(answer)
    server.start()
    for _ in range(500):
        try:
            control.ask({"do": "count", "to": 0}, lambda line: None)
            break
        except NobodyThere:
            threading.Event().wait(0.01)
    yield server
    server.stop()


def test_a_request_is_answered_line_by_line(server: ControlServer) -> None:
    told: list[str] = []
    assert control.ask({"do": "count", "to": 3}, told.append)["counted"] == 3
    assert told == ["0", "1", "2"]


def test_what_can_not_be_done_is_said(server: ControlServer) -> None:
    with pytest.raises(Refused, match="no such request"):
        control.ask({"do": "dance"}, print)


@pytest.mark.parametrize("nonsense", [b"\n", b"not json\n", b"[]\n", b"x" * 10_000, b""])
def test_nonsense_ends_only_its_own_connection(
    server: ControlServer, address: bytes, nonsense: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
    assert control.ask({"do": "count", "to": 1}, lambda line: None)["counted"] == 1


def test_a_client_that_goes_away_does_not_stop_what_it_began(server: ControlServer, address: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        connection.sendall(json.dumps({"do": "count", "to": 100_000}).encode() + b"\n")
    assert control.ask({"do": "count", "to": 1}, lambda line: None)["counted"] == 1


def test_who_is_neither_root_nor_the_user_is_turned_away(server: ControlServer, address: bytes) -> None:
    program = (
        "import socket\n"
        "with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:\n"
        f"    connection.connect({address!r})\n"
        "    print(connection.recv(1000).decode())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], user=65534, capture_output=True, text=True)
    assert json.loads(done.stdout) == {"ok": False, "problem": "only root may do that"}


def test_the_next_proxy_gets_the_address_when_the_first_ends(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_RETRY", 0.01)
    second = ControlServer(lambda request, tell: {"who": "second"})
    second.start()
    server.stop()
    try:
        for _ in range(500):
            try:
                found = control.ask({"do": "count", "to": 0}, lambda line: None)
            except (NobodyThere, Refused):
                found = {}
            if found.get("who") == "second":
                return
            threading.Event().wait(0.01)
        pytest.fail("the second proxy can't be reached")
    finally:
        second.stop()


def test_without_a_proxy_that_is_said(address: bytes) -> None:
    with pytest.raises(NobodyThere, match="no kproxy runs in this network namespace"):
        control.ask({"do": "count", "to": 0}, print)
