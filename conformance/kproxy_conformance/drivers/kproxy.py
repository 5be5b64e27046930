"""kproxy, fed by a directory of manifests or by an API server."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from kproxy_conformance.apiserver.server import Server
from kproxy_conformance.apiserver.store import Store
from kproxy_conformance.drivers.driver import NO_OPTIONS, Options, ProxyDriver
from kproxy_conformance.network.addresses import NODE
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite.objects import Json, base_objects, key_of
from kproxy_core.app.control import send_request
from kproxy_core.app.requests import Explain, parse_texts

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
KPROXY = str(Path(sys.executable).with_name("kproxy"))
"""The command of the kproxy that is installed beside this interpreter."""


class KproxyDriver(ProxyDriver):
    """kproxy with its objects in a directory, one YAML file each."""

    name = "kproxy"

    def __init__(
        self, topology: Topology, directory: Path, command: str = KPROXY, options: Options = NO_OPTIONS
    ) -> None:
        super().__init__(topology, directory, command, options)
        self._prepare()
        for obj in base_objects(self.families):
            self.apply(obj)

    def _prepare(self) -> None:
        self._manifests = self.directory / "manifests"
        self._manifests.mkdir()

    def apply(self, obj: Json) -> None:
        path = self._path(obj)
        scratch = path.with_name(f".{path.name}.tmp")
        scratch.write_text(yaml.dump(obj, Dumper=_DUMPER, sort_keys=False))
        scratch.replace(path)

    def delete(self, obj: Mapping[str, Any]) -> None:
        self._path(obj).unlink(missing_ok=True)

    def explained(self, requests: Sequence[Mapping[str, str]]) -> list[Json] | None:
        if not self.is_running:
            return None
        with self.node.entered():
            answers = [send_request(parse_texts(Explain, request)) for request in requests]
        return [packet for answer in answers for packet in answer["packets"]]

    def arguments(self, mode: str, config: Path) -> list[str]:
        chosen = [f"--mode={mode}", "--mode-fallback=never"]
        return [*chosen, f"--config={config}", *self._source(), f"--hostname-override={NODE}"]

    def _source(self) -> list[str]:
        return [f"--manifests={self._manifests}"]

    def _path(self, obj: Mapping[str, Any]) -> Path:
        return self._manifests / f"{'_'.join(key_of(obj))}.yaml".lower()


class ThroughApiDriver(KproxyDriver):
    """kproxy with its objects from the static API server, which serves on the node's loopback."""

    name = "kproxy-through-api"

    def _prepare(self) -> None:
        self._store = Store({})
        with self.node.entered():
            self._server = Server(("127.0.0.1", 0), self._store)
        self._server.start()

    def apply(self, obj: Json) -> None:
        self._store.apply(obj)

    def delete(self, obj: Mapping[str, Any]) -> None:
        with suppress(KeyError):
            self._store.remove(obj)

    def _source(self) -> list[str]:
        return [f"--master=http://127.0.0.1:{self._server.port}"]

    def close(self) -> None:
        super().close()
        self._server.stop()
