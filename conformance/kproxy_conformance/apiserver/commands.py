"""``pods/exec`` over a websocket: commands of clients, run where a pod's node is.

The subprotocol is ``v4.channel.k8s.io`` (k8s.io/apimachinery, pkg/util/remotecommand): the first byte of each
binary message is a channel: 1 and 2 for output, 3 for a Status with the command's result.
"""

import contextlib
import os
import selectors
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import IO

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Request
from wsproto.utilities import LocalProtocolError

from kproxy_conformance.apiserver.store import ApiError, Json, encode

PROTOCOL = "v4.channel.k8s.io"
_STDOUT, _STDERR, _RESULT = 1, 2, 3
_BLOCK = 32768

Locate = Callable[[Json, Sequence[str]], Sequence[str]]
"""Returns what to run for a command in a pod, such as the command behind ``ip netns exec`` of its node."""


class Commands:
    """The commands of all clients. Those that run outlive their connections, as in a pod."""

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._running: set[subprocess.Popen[bytes]] = set()

    def serve(self, client: socket.socket, headers: Sequence[tuple[str, str]], path: str, pod: Json,
              command: Sequence[str]) -> None:
        """Run *command* of *pod* for a *client* that asks to upgrade its connection. Raises ApiError."""
        connection = WSConnection(ConnectionType.SERVER)
        connection.initiate_upgrade_connection([(k.encode(), v.encode()) for k, v in headers], path)
        asked = next(connection.events(), None)
        if not isinstance(asked, Request) or PROTOCOL not in asked.subprotocols:
            raise ApiError(400, "BadRequest", f"unable to upgrade: {PROTOCOL} is needed")
        client.sendall(connection.send(AcceptConnection(subprotocol=PROTOCOL)))

        def send(channel: int, data: bytes) -> None:
            with contextlib.suppress(OSError, LocalProtocolError):  # The client may be gone.
                client.sendall(connection.send(BytesMessage(bytes([channel]) + data)))

        send(_RESULT, encode(self._run(command, pod, send)))
        with contextlib.suppress(OSError, LocalProtocolError):
            client.sendall(connection.send(CloseConnection(1000)))
            while client.recv(_BLOCK):
                pass

    def _run(self, command: Sequence[str], pod: Json, send: Callable[[int, bytes], None]) -> Json:
        """Run *command*, pass its output to *send*, and return the Status of its end."""
        try:
            process = subprocess.Popen(
                self._locate(pod, command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE)
        except OSError as error:
            return _failure("InternalError", f"failed to exec in container: {command[0]}: {error.strerror}")
        self._running.add(process)
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            _pass_on({process.stdout: _STDOUT, process.stderr: _STDERR}, send)
        self._running.discard(process)
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if not status:
            return {"metadata": {}, "status": "Success"}
        message = f"command terminated with non-zero exit code: exit status {status}"
        return _failure("NonZeroExitCode", message) | {
            "details": {"causes": [{"reason": "ExitCode", "message": str(status)}]}}

    def stop(self) -> None:
        """Kill the commands that still run."""
        for process in list(self._running):
            process.kill()


def _pass_on(channels: dict[IO[bytes], int], send: Callable[[int, bytes], None]) -> None:
    with selectors.DefaultSelector() as selector:
        for pipe, channel in channels.items():
            selector.register(pipe, selectors.EVENT_READ, channel)
        while selector.get_map():
            for key, _ in selector.select():
                if data := os.read(key.fd, _BLOCK):
                    send(key.data, data)
                else:
                    selector.unregister(key.fileobj)


def _failure(reason: str, message: str) -> Json:
    return {"metadata": {}, "status": "Failure", "reason": reason, "message": message}
