"""kproxy as an operator starts it: a process of its own on a node, asked through its ports."""

import http.client
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.core.namespaces import Namespace
from tests.patience import PATIENCE

KPROXY = str(Path(sys.executable).with_name("kproxy"))

HEALTH = 10256
"""The port of kube-proxy's health server."""

Process = subprocess.Popen[str]


class Proxy:
    """A running kproxy."""

    def __init__(self, node: Namespace, process: Process) -> None:
        self._node = node
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def get(self, port: int, path: str) -> tuple[int, str]:
        """Status and body."""
        return get(self._node, port, path)

    def health(self, path: str = "/healthz", port: int = HEALTH) -> tuple[int, str]:
        """Return status and body; status 0: no process listens yet. The process must be alive."""
        assert self._process.poll() is None, self.ended()
        try:
            return self.get(port, path)
        except OSError:
            return 0, ""

    def await_health(self, path: str = "/healthz", port: int = HEALTH) -> None:
        deadline = time.monotonic() + PATIENCE
        while (found := self.health(path, port))[0] != 200:
            assert time.monotonic() < deadline, f"not healthy after {PATIENCE} s: {found}"
            time.sleep(0.05)

    def await_log(self, text: str) -> None:
        """Read the log until a line holds *text*; later reads do not return what was read."""
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            if text in line:
                return
            lines.append(line)
        raise AssertionError(f"ended without saying {text!r}: {''.join(lines)}")

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send signal *number*; then as `ended`."""
        self._process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Exit status and log, once it has ended."""
        _, log = self._process.communicate(timeout=PATIENCE)
        return self._process.returncode, log


def get(node: Namespace, port: int, path: str) -> tuple[int, str]:
    """Status and body of what a server on *node* answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.sock = node.inside(lambda: socket.create_connection(("127.0.0.1", port), PATIENCE))
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def running(node: Namespace, *arguments: str) -> AbstractContextManager[Proxy]:
    """kproxy with these *arguments*, for as long as the context lasts."""
    confined = any(argument.startswith("--config=") for argument in arguments)
    assert confined or "--mode=ebpf" not in arguments, "see bpf_places.confined"
    return started(node, ["ip", "netns", "exec", node.name, KPROXY, *arguments])


@contextmanager
def started(node: Namespace, command: Sequence[str]) -> Iterator[Proxy]:
    """The kproxy that *command* starts on *node*, for as long as the context lasts."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield Proxy(node, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def kproxy(*arguments: str, node: Namespace | None = None) -> subprocess.CompletedProcess[str]:
    """Run kproxy until it exits by itself, and return its output and status."""
    command = [KPROXY, *arguments]
    if node is not None:
        command = ["ip", "netns", "exec", node.name, *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
