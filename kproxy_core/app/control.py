"""The socket through which commands talk to the proxy of their network namespace.

Its address is abstract (unix(7)): it belongs to the network namespace, as the rules do, and disappears with
the process. Every process of the namespace may take any abstract name, so the name is random, clients read
the existing ones from /proc/net/unix, and both ends check whom they talk to (`problem_of_peer`). A request is
one line of JSON, see `kproxy_core.app.requests`; the answer is lines of JSON, the last of which has ``"ok"``.
"""

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kproxy_core import __version__
from kproxy_core.app import requests
from kproxy_core.app.errors import Misused, NoProxy, RequestRefused
from kproxy_core.app.requests import Answer, Request
from kproxy_core.linux import process
from kproxy_core.observe.logs import printable, printable_json

if TYPE_CHECKING:
    from kproxy_core.modes.switch import ReportProgress  # A command that asks a proxy needs none of the rest.

T = TypeVar("T")

# The process at the other end of a socket, and whether it may change this node's service proxy.

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77
"""Linux 6.5, include/uapi/asm-generic/socket.h."""

_REQUIRED: Final = "CAP_NET_ADMIN"
"""With this capability a process could rewrite the rules by itself."""


def problem_of_peer(connection: socket.socket) -> str:
    """Return why the process at the other end has no power over this node's rules; "" if it has.

    The kernel identified it when it connected, or when it began to listen. Raises OSError.
    """
    pid, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    pidfd = _pidfd(connection, pid)
    try:
        return _problem(pid, uid, pidfd)
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def _problem(pid: int, uid: int, pidfd: int) -> str:
    """Return why a process has no power. *pid* 0: it is in another PID namespace, and not visible.

    User id 0 proves nothing: a container may run as root, in the node's network namespace, without any
    capability, or with all of them in a user namespace of its own.
    """
    if uid not in (0, os.geteuid()):
        return f"user {uid} is neither root nor the user that runs kproxy"
    if pid == 0 or pidfd < 0:
        return "the process is in another PID namespace, such as that of another container"
    try:
        same_user_namespace = os.path.samefile(f"/proc/{pid}/ns/user", "/proc/self/ns/user")
        lacking = (process.held() & {_REQUIRED}) - process.held(pid)
    except PermissionError:  # ptrace(2): it has privileges that this process lacks, or is not dumpable.
        more = ", ".join(sorted(process.held(pid) - process.held())) or "others"
        return (
            f"process {pid} has capabilities that this one lacks ({more}); run the command with"
            " those of the proxy, for example as root in its container")
    except OSError as error:
        return f"the privileges of process {pid} cannot be read: {error.strerror}"
    if not same_user_namespace:
        return f"process {pid} is in another user namespace"
    if lacking:
        return f"process {pid} does not have {_REQUIRED}"
    if _has_ended(pidfd):  # Its number may belong to another process by now.
        return f"process {pid} has ended"
    return ""


def _pidfd(connection: socket.socket, pid: int) -> int:
    """Return a descriptor of the process; -1: it cannot be followed."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return -1
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if pid else -1
    return -1


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


# The server, and the request of a client.

log = logging.getLogger("kproxy.run")

PREFIX = "kproxy/control/"
"""All names begin with this, after the null byte that marks an abstract one."""

_LONGEST_LINE = 4096
_LONGEST_ANSWER = 64 << 20
_TIMEOUT = 5.0
"""Seconds for a client to send its request, and to take an answer."""
_MAX_CLIENTS = 16
"""Clients that are served at the same time."""

Handler = Callable[[Request, "ReportProgress"], Answer]
"""Fulfils a request. Calls its second argument with lines of progress, and returns the fields of the final
answer. Raises RequestRefused."""


class ControlServer:
    """Serves each client in a thread of its own."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._refused = False

    def start(self) -> None:
        """Start serving. Without a socket, which is logged, the mode cannot be switched while running."""
        try:
            self._listener.bind(f"\0{PREFIX}{secrets.token_hex(16)}")
            self._listener.listen()
        except OSError as error:
            log.warning("control socket unavailable, `kproxy switch` will not work", extra={
                "fields": {"error": error.strerror}})
            return
        threading.Thread(target=self._run, name="kproxy-control", daemon=True).start()

    def stop(self) -> None:
        """Take no more requests."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not (self._admit(client) and self._slots.acquire(blocking=False)):
                client.close()
                continue
            threading.Thread(
                target=self._serve, args=(client,), name="kproxy-control-client", daemon=True).start()

    def _admit(self, client: socket.socket) -> bool:
        """Return whether *client* may send requests. If not, answer with the reason at once."""
        client.settimeout(_TIMEOUT)
        try:
            problem = problem_of_peer(client)
            if problem:
                # Every process of the network namespace may try, and as often as it likes.
                level = logging.DEBUG if self._refused else logging.WARNING
                log.log(level, "control request refused", extra={"fields": {"because": problem}})
                self._refused = True
                _send(client, {"ok": False, "problem": f"permission denied: {problem}"})
        except OSError:
            return False
        return not problem

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                self._answer(client)
        except (OSError, ValueError, RecursionError) as error:  # the last one is about nested JSON
            log.debug("control request dropped", extra={"fields": {"error": repr(error)}})
        finally:
            self._slots.release()

    def _answer(self, client: socket.socket) -> None:
        with client.makefile("rb") as file:
            given = json.loads(file.readline(_LONGEST_LINE))
        if not isinstance(given, dict):
            raise ValueError("not an object")
        gone = threading.Event()

        def report_progress(line: str) -> None:
            if not gone.is_set():
                try:
                    _send(client, {"told": line})
                except OSError:  # The request is completed even if its client has gone.
                    gone.set()

        try:
            answer = {"ok": True, **self._handler(requests.parse(given), report_progress)}
        except RequestRefused as error:
            mistake = {"mistake": True} if isinstance(error, Misused) else {}
            answer = {"ok": False, "problem": str(error), **mistake}
        except Exception as error:
            log.exception("control request failed unexpectedly")
            answer = {"ok": False, "problem": repr(error)}
        _send(client, answer)


def send_request(request: Request, report_progress: "ReportProgress" = lambda line: None) -> Answer:
    """Send *request* to the proxy of this network namespace and return its final answer.

    Calls *report_progress* with each line in between. All texts are printable. Raises NoProxy or
    RequestRefused.
    """
    with _connect() as connection:
        try:
            with contextlib.suppress(BrokenPipeError):  # A refusal may precede the request.
                connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as file:
                while line := file.readline(_LONGEST_ANSWER):
                    answer = json.loads(line)
                    if "told" in answer:
                        report_progress(printable(str(answer["told"])))
                    elif answer["ok"]:
                        return _checked(request, answer)
                    else:
                        kind = Misused if answer.get("mistake") is True else RequestRefused
                        raise kind(printable(str(answer["problem"])))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestRefused(f"the proxy's answer is malformed: {error!r}") from error
        except OSError as error:
            raise RequestRefused(f"the connection to the proxy failed: {error.strerror}") from error
    raise RequestRefused("the proxy exited before it answered")


def ask(request: Request, kind: type[T]) -> T:
    """Send *request* as `send_request` does, and return its final answer as a *kind* of reply.

    Raises NoProxy, or RequestRefused also if another version has answered.
    """
    try:
        return msgspec.convert(send_request(request), kind)
    except msgspec.ValidationError as error:
        raise RequestRefused(
            f"the proxy answers as another version than this command, {__version__}: {error}") from error


def _checked(request: Request, answer: Answer) -> Answer:
    """Return *answer* with printable texts. Raises RequestRefused if another version has answered."""
    missing = [name for name in request.answer_fields if name not in answer]
    if missing:
        raise RequestRefused(
            f"the proxy's answer has no {missing[0]!r}: it runs another version than this command,"
            f" {__version__}")
    return dict(printable_json(answer))


def _connect() -> socket.socket:
    """Return a connection to the only proxy that can be trusted. Raises NoProxy."""
    trusted: list[socket.socket] = []
    problems: list[str] = []
    for name in _names():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)  # A full queue is an error at once.
        with contextlib.suppress(OSError):
            connection.connect("\0" + name)
            if not (problem := problem_of_peer(connection)):
                trusted.append(connection)
                continue
            problems.append(problem)
        connection.close()
    if len(trusted) == 1:
        trusted[0].setblocking(True)
        return trusted[0]
    for connection in trusted:
        connection.close()
    if trusted:
        raise NoProxy(f"{len(trusted)} kproxy processes run in this network namespace: stop all but one")
    if problems:
        raise NoProxy(f"the kproxy of this network namespace is not trusted: {problems[0]}")
    raise NoProxy("no kproxy runs in this network namespace")


def _names() -> Iterator[str]:
    """Yield the names of all listening control sockets, without the null byte."""
    pattern = re.compile(rf"@({re.escape(PREFIX)}[0-9a-f]{{32}})")
    try:
        sockets = Path("/proc/thread-self/net/unix").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    for line in sockets.splitlines():
        found = pattern.fullmatch(line.rpartition(" ")[2])
        if found and line.split()[3] == "00010000":  # __SO_ACCEPTCON
            yield found[1]


def _send(to: socket.socket, message: Mapping[str, Any]) -> None:
    to.sendall(json.dumps(message).encode() + b"\n")
