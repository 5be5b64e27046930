"""The control socket of a running proxy, and who may use it."""

import contextlib
import ctypes
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kproxy_core import __version__
from kproxy_core.app import control
from kproxy_core.app.control import ControlServer, send_request
from kproxy_core.app.errors import NoProxy, RequestRefused
from kproxy_core.app.requests import Plans, Request, Top
from kproxy_core.linux import process as privileges
from tests.core.other_user import as_nobody
from tests.patience import PATIENCE

CLIENT = """
import contextlib, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(chr(0) + sys.argv[1])
    with contextlib.suppress(OSError):
        connection.sendall(b'{"do": "top", "start": 0}' + bytes([10]))
    print(connection.makefile().readline())
"""


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """One that no proxy on this machine has."""
    own = f"kproxy/test-{secrets.token_hex(4)}/"
    monkeypatch.setattr(control, "PREFIX", own)
    return own


def answer(request: Request, report_progress: Callable[[str], None]) -> Mapping[str, Any]:
    if not isinstance(request, Top):
        raise RequestRefused("only counting here")
    if request.search:
        raise KeyError(request.search)
    for number in range(request.start):
        report_progress(str(number))
    return {"status": {}, "services": [], "found": request.start, "all": 0, "counted": False}


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer(answer)
    server.start()
    yield server
    server.stop()


def count(to: int = 1) -> object:
    return send_request(Top(start=to))["found"]


def connected() -> socket.socket:
    (name,) = control._names()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + name)
    connection.settimeout(PATIENCE)
    return connection


def answer_to_client(*command: str, **options: Any) -> dict[str, Any]:
    """Return the answer to a client in a process of its own, started by *command*."""
    (name,) = control._names()
    done = subprocess.run([*command, sys.executable, "-c", CLIENT, name], capture_output=True, text=True,
                          timeout=120, check=True, **options)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_request_is_answered_line_by_line(server: ControlServer) -> None:
    lines: list[str] = []
    assert send_request(Top(start=3), lines.append)["found"] == 3
    assert lines == ["0", "1", "2"]


def test_a_refused_request_has_a_reason(server: ControlServer) -> None:
    with pytest.raises(RequestRefused, match="only counting here"):
        send_request(Plans())


@pytest.mark.parametrize(("given", "problem"), [
    ({"do": "dance"}, f"unknown request 'dance': this is kproxy {__version__}"),
    ({"do": ["top"]}, f"unknown request ['top']: this is kproxy {__version__}"),
    ({"mode": "x"}, f"unknown request None: this is kproxy {__version__}"),
    ({"do": "switch"}, "request 'switch': Object missing required field `mode`"),
    ({"do": "switch", "mode": 7}, "request 'switch': mode: Expected `str`, got `int`"),
    ({"do": "explain", "to": "web", "from": None}, "request 'explain': from: Expected `str`, got `null`"),
    ({"do": "top", "count": 0}, "request 'top': count: Expected `int` >= 1"),
    ({"do": "top", "sort": "luck"}, "request 'top': sort: Invalid enum value 'luck'"),
    ({"do": "top", "search": "x" * 201}, "request 'top': search: Expected `str` of length <= 200"),
], ids=str)  # fmt: skip
def test_a_bad_request_is_answered_with_its_field(
    server: ControlServer, given: dict[str, object], problem: str
) -> None:
    with connected() as connection:
        connection.sendall(json.dumps(given).encode() + b"\n")
        assert json.loads(connection.makefile().readline()) == {"ok": False, "problem": problem}


def test_fields_of_a_newer_command_are_ignored(server: ControlServer) -> None:
    with connected() as connection:
        connection.sendall(b'{"do": "top", "start": 2, "colour": "red"}\n')
        *_, last = connection.makefile()
        assert json.loads(last)["found"] == 2


def test_a_request_that_fails_unexpectedly_is_answered_and_logged(
    server: ControlServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RequestRefused, match="KeyError"):
        send_request(Top(search="nothing"))
    assert "control request failed unexpectedly" in caplog.text
    assert count(1) == 1


@pytest.mark.parametrize("nonsense", [
    b"\n", b"not json\n", b"[]\n", b"x" * 10_000, b"", b"[" * 4095 + b"\n", b'{"do":' * 600 + b"\n",
], ids=repr)  # fmt: skip
def test_nonsense_ends_only_its_own_connection(server: ControlServer, nonsense: bytes) -> None:
    with connected() as connection:
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
    assert count() == 1


def test_a_client_that_disconnects_does_not_stop_its_request(server: ControlServer) -> None:
    with connected() as connection:
        connection.sendall(json.dumps({"do": "top", "start": 100_000}).encode() + b"\n")
    assert count() == 1


def test_idle_clients_do_not_delay_the_next_one(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_TIMEOUT", 3600.0)
    with contextlib.ExitStack() as idle:
        for _ in range(5):
            idle.enter_context(connected())
        assert count() == 1


def test_idle_clients_without_permission_take_no_place(server: ControlServer) -> None:
    (name,) = control._names()
    program = f"""
import socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(100)]
for connection in held:
    connection.connect("\\0{name}")
print("connected", flush=True)
sys.stdin.read()
"""
    idle = subprocess.Popen(
        as_nobody(sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with idle:
        assert idle.stdout is not None
        assert idle.stdout.readline() == b"connected\n"
        assert count() == 1
        idle.communicate(b"")


def test_another_user_is_refused(server: ControlServer) -> None:
    problem = "permission denied: user 65534 is neither root nor the user that runs kproxy"
    assert answer_to_client(*as_nobody()) == {"ok": False, "problem": problem}


@pytest.mark.parametrize(("command", "problem"), [
    ((), ""),
    (("unshare", "--mount"), ""),
    (("unshare", "--pid", "--fork"), ""),
    (("unshare", "--user", "--map-root-user"), "is in another user namespace"),
    (("unshare", "--user", "--map-root-user", "--pid", "--fork"), "is in another user namespace"),
], ids=" ".join)  # fmt: skip
def test_a_root_user_in_a_user_namespace_is_refused(
    server: ControlServer, command: tuple[str, ...], problem: str
) -> None:
    found = answer_to_client(*command)
    assert found["ok"] == (not problem)
    assert problem in found.get("problem", "")


def test_a_root_user_without_the_capability_is_refused(server: ControlServer) -> None:
    found = answer_to_client(preexec_fn=drop_net_admin)
    assert not found["ok"]
    assert found["problem"].endswith("does not have CAP_NET_ADMIN")


def test_a_process_of_another_pid_namespace_is_refused(prefix: str) -> None:
    """Its process id means nothing here: the proxy runs in a container, the client does not."""
    program = f"""
from kproxy_core.app import control
control.PREFIX = {prefix!r}
server = control.ControlServer(lambda request, report_progress: {{}})
server.start()
print("serving", flush=True)
input()
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        found = answer_to_client()
        process.communicate(b"\n")
    assert not found["ok"]
    assert "another PID namespace" in found["problem"]


def test_between_processes_with_the_same_few_capabilities_it_works(prefix: str) -> None:
    """As in the pod, whose main process and whose `kubectl exec` have only CAP_NET_ADMIN."""
    few = ("setpriv", "--bounding-set=-all,+net_admin", "--inh-caps=-all", sys.executable, "-c")
    serve = f"""
from kproxy_core.app import control
control.PREFIX = {prefix!r}
server = control.ControlServer(lambda request, report_progress: {{"mode": "served", "plans": []}})
server.start()
print("serving", flush=True)
input()
"""
    ask = f"""
from kproxy_core.app import control
from kproxy_core.app.requests import Plans
control.PREFIX = {prefix!r}
print(control.send_request(Plans())["mode"])
"""
    process = subprocess.Popen([*few, serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        done = subprocess.run([*few, ask], capture_output=True, text=True, check=False)
        refused = answer_to_client()
        process.communicate(b"\n")
    assert done.stdout == "served\n", done.stderr
    assert "run the command with those of the proxy" in refused["problem"]


def drop_net_admin() -> None:
    """Drop the capability from the bounding set: exec then grants root all but this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(24, privileges.CAPABILITIES["CAP_NET_ADMIN"], 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


def test_a_socket_of_another_user_does_not_hide_the_proxy(server: ControlServer, prefix: str) -> None:
    with squatter(prefix):
        assert len(list(control._names())) == 2
        assert count() == 1


def test_a_missing_proxy_is_reported(prefix: str) -> None:
    with pytest.raises(NoProxy, match=r"^no kproxy runs in this network namespace$"):
        count()
    with squatter(prefix), pytest.raises(NoProxy, match=r"is not trusted: user 65534 is neither root nor"):
        count()


@contextlib.contextmanager
def squatter(prefix: str) -> Iterator[None]:
    """Another user's process that listens under a name that a proxy could have."""
    program = f"""
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0{prefix}{'0' * 32}")
listener.listen()
print("listening", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        as_nobody(sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        try:
            yield
        finally:
            process.communicate(b"")


def test_two_proxies_in_one_namespace_are_not_confused(server: ControlServer) -> None:
    second = ControlServer(answer)
    second.start()
    with pytest.raises(NoProxy, match="2 kproxy processes"):
        count()
    second.stop()
    deadline = time.monotonic() + 10
    while len(list(control._names())) > 1 and time.monotonic() < deadline:
        pass
    assert count() == 1


@pytest.mark.parametrize("reply", [
    b'{"ok": false, "problem": "\\u001b]0;hacked\\u0007"}\n', b'{"ok": true, "x": []}\n',
    b'{"ok": true, "mode": "x", "plans": [{"y": "\\u001b[2J"}]}\n',
    b'{"told": "\\u001b[2J\\u009b"}\n', b"{}\n", b"[]\n", b"[" * 50_000 + b"\n", b"\x1b[2J\n", b"",
], ids=repr)  # fmt: skip
def test_a_hostile_answer_is_an_error_in_printable_text(reply: bytes, prefix: str) -> None:
    lines: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{prefix}{'f' * 32}")
        listener.listen()
        process = os.fork()
        if not process:
            client, _ = listener.accept()
            client.recv(1000)
            client.sendall(reply)
            os._exit(0)
        try:
            lines.append(str(send_request(Plans(), lines.append)))
        except RequestRefused as error:
            lines.append(str(error))
        os.waitpid(process, 0)
    assert lines
    assert all(line.isprintable() for line in lines), lines


def test_the_answer_of_an_incompatible_version_is_one_clear_error(prefix: str) -> None:
    def old(request: Request, report_progress: Callable[[str], None]) -> Mapping[str, Any]:
        return {"mode": "x"}

    server = ControlServer(old)
    server.start()
    with pytest.raises(RequestRefused, match="answer has no 'plans': it runs another version"):
        send_request(Plans())
    server.stop()
