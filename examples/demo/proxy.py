"""The kproxy of the demo: its process, manifests, log and metrics."""

import http.client
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from examples.demo.sandbox import Place

EXAMPLES = Path(__file__).parents[1]
KPROXY = Path(sys.executable).with_name("kproxy")
START_DEADLINE = 60.0
STOP_DEADLINE = 30.0

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)


class ProxyFailed(Exception):
    """kproxy did not start, or exited; the message has the end of its log."""


class Proxy:
    """`kproxy --manifests DIR` with *options*, on *node*; its log goes to *directory*."""

    def __init__(
        self, node: Place, directory: Path, manifests: Path, options: list[str], *,
        healthz_port: int = 10256, metrics_port: int = 10249,
    ) -> None:
        self._node = node
        self._log = directory / "kproxy.log"
        self.manifests = manifests
        self.command = [str(KPROXY), f"--manifests={manifests}", *options]
        self._healthz_port = healthz_port
        self._metrics_port = metrics_port
        self.started_in = 0.0
        """Seconds from process start until /healthz returned 200."""

    def __enter__(self) -> Self:
        begun = time.monotonic()
        with self._log.open("wb") as log:
            self._process = self._node.start(self.command, log)
        while not self._healthy():
            if self._process.poll() is not None:
                raise ProxyFailed(f"kproxy exited with status {self._process.returncode}\n{self.log_tail()}")
            if time.monotonic() - begun > START_DEADLINE:
                self.stop()
                raise ProxyFailed(f"/healthz did not return 200\n{self.log_tail()}")
            time.sleep(0.005)
        self.started_in = time.monotonic() - begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process ignores it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-20:])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def resident_mebibytes(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else 0.0

    def _healthy(self) -> bool:
        try:
            return self._get(self._healthz_port, "/healthz")[0] == 200
        except OSError:
            return False

    def _get(self, port: int, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            with self._node.entered():
                connection.connect()
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def mode(self) -> str:
        """Return the serving mode, as the process reports it."""
        return self._get(self._metrics_port, "/proxyMode")[1]

    def metric(self, name: str) -> float:
        """Return the sum of the metric *name* over all its labels."""
        text = self._get(self._metrics_port, "/metrics")[1]
        return sum(float(value) for found, _, value in _SAMPLE.findall(text) if found == name)

    # changes of the manifests ------------------------------------------------------------

    def write(self, name: str, documents: list[dict[str, Any]]) -> float:
        """Replace the file *name* by *documents* atomically. Return the time of the write, monotonic."""
        scratch = self.manifests / f".{name}.new"
        scratch.write_text(yaml.safe_dump_all(documents, sort_keys=False), encoding="utf-8")
        begun = time.monotonic()
        os.replace(scratch, self.manifests / name)
        return begun

    def remove(self, name: str) -> float:
        begun = time.monotonic()
        (self.manifests / name).unlink()
        return begun

    def without_endpoint(self, name: str, pod: str) -> list[dict[str, Any]]:
        """Return the objects of the file *name*, without *pod* in any EndpointSlice."""
        documents = list(yaml.safe_load_all((self.manifests / name).read_text(encoding="utf-8")))
        for document in documents:
            document["endpoints"] = [e for e in document["endpoints"] if e["targetRef"]["name"] != pod]
        return documents
