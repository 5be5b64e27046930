"""The API server of a soak, and the changes that its objects go through all the time."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.core.api_servers import BenchServer
from tests.core.namespaces import Namespace
from tests.soak.objects import Change, Objects

PORT = 30_500
"""No client, relay or node port takes it while the server is away (`traffic.PORTS`, ip_local_port_range)."""
_PLURALS = {"Service": "services", "EndpointSlice": "endpointslices"}


class Churn:
    """Changes the objects of an API server, and takes that server away."""

    def __init__(self, objects: Objects, node: Namespace, directory: Path, rate: float) -> None:
        """*rate*: changes a second."""
        self.changes = 0
        self._objects = objects
        self._rate = rate
        self._file = directory / "objects.json"
        directory.mkdir()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._version = 1000
        """Of the objects before a start; greater than all that the previous one used."""
        self._write()
        self._server = BenchServer(*self._options, node=node, port=PORT)
        self._thread = threading.Thread(target=self._run, name="churn")
        self._thread.start()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def _options(self) -> list[str]:
        return ["--manifests", str(self._file.parent), "--version", str(self._version)]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._server.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No object changes."""
        with self._lock:
            yield

    def mark_service(self, number: int) -> None:
        """Change the Service of `objects.MARK`. Call in `paused`."""
        self._send(self._objects.mark_service(number))

    def mark_endpoints(self, number: int) -> None:
        """Change the endpoints of `objects.MARK`. Call in `paused`."""
        self._send(self._objects.mark_endpoints(number))

    def go_away(self, seconds: float, rng: random.Random) -> None:
        """Kill the server, and start it after *seconds* with a few other objects and without its history."""
        with self._lock:
            self._server.stop()
            time.sleep(seconds)
            for _ in range(rng.randint(0, 20)):
                self._objects.change()
                self.changes += 1
            self._version += 10_000 + self.changes
            self._write()
            self._server.start(*self._options)

    def hang(self, seconds: float) -> None:
        """Stop answering for *seconds*, with all connections open."""
        with self._lock:
            self._server.freeze()
            time.sleep(seconds)
            self._server.thaw()

    def forget_history(self) -> None:
        """End all watches; their versions are then too old."""
        self._server.post("expire")

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            due = max(due + 1 / self._rate, time.monotonic() - 1)
            with self._lock:
                for change in self._objects.change():
                    self._send(change)

    def _send(self, change: Change) -> None:
        """Tell the server. Damage may cut this program off from it for a while."""
        self.changes += 1
        value = change.value
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                if change.deleted:
                    meta = value["metadata"]
                    self._server.post("delete", resource=_PLURALS[value["kind"]],
                                      namespace=meta["namespace"], name=meta["name"])  # fmt: skip
                else:
                    self._server.post("apply", **value)
                return

    def _write(self) -> None:
        self._file.write_text(json.dumps({"kind": "List", "items": self._objects.all}))
