"""The socket through which ``kproxy switch`` talks to the proxy of its network namespace.

Its address is abstract (unix(7)): it belongs to the network namespace, as the rules do, and goes with the
process. Who is not root, nor of the process's own user, is turned away. One request, a line of JSON; answers
are lines of JSON, the last of which has ``"ok"``.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

log = logging.getLogger("kproxy.run")

ADDRESS = b"\0kproxy/control"
_LONGEST_REQUEST = 4096
_PATIENCE = 5.0
"""Seconds for a request, and for a client to take an answer."""
_RETRY = 5.0
"""Seconds until the address is asked for again that another process has."""

_CREDENTIALS = struct.Struct("3i")

Answer = Callable[[Mapping[str, Any], Callable[[str], None]], Mapping[str, Any]]
"""Does what a request asks for, telling lines about it meanwhile; returns what the last answer adds."""


class Refused(Exception):
    """A request that can't be fulfilled; one line for who asked."""


class NobodyThere(Exception):
    """No proxy runs in this network namespace."""


class ControlServer:
    """Answers one client at a time, in a thread of its own."""

    def __init__(self, answer: Answer) -> None:
        """*answer* raises Refused."""
        self._answer = answer
        self._stopping = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="kproxy-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests."""
        self._stopping.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        listener = self._listen()
        if listener is None:
            return
        with listener:
            while not self._stopping.is_set():
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(_PATIENCE)
                    with contextlib.suppress(OSError, ValueError):
                        self._serve(client)

    def _listen(self) -> socket.socket | None:
        """The socket, once no other process has its address; None if stopped before."""
        self._socket = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        told = False
        while not self._stopping.is_set():
            try:
                listener.bind(ADDRESS)
                listener.listen()
                return listener
            except OSError as error:
                if not told:
                    log.warning("can't be reached by `kproxy switch`: another kproxy runs here", extra={
                        "fields": {"error": error.strerror}})
                told = True
                self._stopping.wait(_RETRY)
        listener.close()
        return None

    def _serve(self, client: socket.socket) -> None:
        _, user, _ = _CREDENTIALS.unpack(
            client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user not in (0, os.geteuid()):
            _send(client, {"ok": False, "problem": "only root may do that"})
            return
        request = json.loads(_read_line(client))
        if not isinstance(request, dict):
            raise ValueError("not an object")
        gone = threading.Event()

        def tell(line: str) -> None:
            if not gone.is_set():
                try:
                    _send(client, {"told": line})
                except OSError:  # what was begun is finished all the same
                    gone.set()

        try:
            _send(client, {"ok": True, **self._answer(request, tell)})
        except Refused as error:
            _send(client, {"ok": False, "problem": str(error)})


def ask(request: Mapping[str, Any], told: Callable[[str], None]) -> Mapping[str, Any]:
    """Have the proxy of this network namespace do something; *told* gets what it tells meanwhile.

    Raises NobodyThere, or Refused.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(ADDRESS)
        except OSError as error:
            raise NobodyThere("no kproxy runs in this network namespace") from error
        _send(connection, request)
        for line in _lines(connection):
            answer = json.loads(line)
            if "told" in answer:
                told(str(answer["told"]))
            elif answer["ok"]:
                return dict(answer)
            else:
                raise Refused(str(answer["problem"]))
    raise Refused("the proxy ended before it was done")


def _send(to: socket.socket, message: Mapping[str, Any]) -> None:
    to.sendall(json.dumps(message).encode() + b"\n")


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST_REQUEST:
        piece = connection.recv(_LONGEST_REQUEST - len(data))
        if not piece:
            break
        data += piece
    return data


def _lines(connection: socket.socket) -> Iterator[bytes]:
    try:
        with connection.makefile("rb") as file:
            yield from file
    except OSError:
        return
