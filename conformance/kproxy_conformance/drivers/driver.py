"""A driver starts and stops one proxy on the node, and brings Kubernetes objects to it."""

import copy
import hashlib
import json
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from kproxy_conformance.network.addresses import resolve
from kproxy_conformance.network.dialing import http_get, wait_until
from kproxy_conformance.network.namespaces import Namespace
from kproxy_conformance.network.patience import patience
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite.objects import Json
from kproxy_core.contract.values import Leftovers

HEALTHZ_PORT = 10256
METRICS_PORT = 10249
START_DEADLINE = 30.0
"""Seconds, multiplied by `patience`."""
STOP_DEADLINE = 10.0

BASE_CONFIG: Mapping[str, Any] = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
    "healthzBindAddress": f"0.0.0.0:{HEALTHZ_PORT}",
    "metricsBindAddress": f"127.0.0.1:{METRICS_PORT}",
    "enableProfiling": True,
    "conntrack": {"maxPerCore": 0, "min": 0},
    "iptables": {"minSyncPeriod": "50ms"},
    "nftables": {"minSyncPeriod": "50ms"},
    "ipvs": {"minSyncPeriod": "50ms"},
}


Options = Mapping[str, Mapping[str, object]]
"""Backend options by mode, as in ``kproxy.backendOptions``."""
NO_OPTIONS: Options = MappingProxyType({})


def merged(base: Mapping[str, Any], override: Mapping[str, Any] | None) -> Json:
    """Return *base* with the keys of *override*; nested mappings are merged."""
    found = copy.deepcopy(dict(base))
    for key, value in (override or {}).items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = merged(found[key], value)
        else:
            found[key] = copy.deepcopy(value)
    return found


class DriverError(Exception):
    """The proxy, or its source of objects, failed to do something that every scenario needs."""


class Unavailable(Exception):
    """The backend declares that it lacks something that a step needs."""


Connections = Mapping[tuple[str, str, int, str], int]
"""Counted connections by protocol, frontend's address and port, and endpoint's address ("": refused)."""


class Rejected(Exception):
    """The API server refused an object."""


class Process:
    """A program that runs in a namespace, with its output in a log file."""

    def __init__(self, namespace: Namespace, argv: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._popen = namespace.start(argv, output)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait for the end; kill a process that does not end in time."""
        if self._popen.poll() is None:
            self._popen.send_signal(with_signal)
            try:
                self._popen.wait(STOP_DEADLINE * patience())
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


class Driver:
    """One proxy and its settings. The subclasses bring objects to it."""

    name = ""

    def __init__(self, topology: Topology, directory: Path, options: Options = NO_OPTIONS) -> None:
        """*directory* is for logs and configuration files."""
        self.node = topology["node"]
        self.families = topology.families
        self.directory = directory
        self._options = merged(topology.wiring.options, options)
        self._settings: tuple[str, str] | None = None

    def apply(self, obj: Json) -> None:
        """Create or replace one object. Raises Rejected."""
        raise NotImplementedError

    def delete(self, obj: Mapping[str, Any]) -> None:
        """Delete one object, of which only kind and metadata are used."""
        raise NotImplementedError

    def _start(self, mode: str, config: Mapping[str, Any] | None) -> None:
        raise NotImplementedError

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop the proxy if it runs; its rules are left in place."""
        raise NotImplementedError

    def cleanup(self) -> None:
        raise NotImplementedError

    def retire(self) -> Leftovers:
        """Retire the mode, as after a switch. Return what was removed, and what is still needed."""
        raise NotImplementedError

    def counted(self, family: str) -> Connections:
        """Return the connections that the backend has counted. Raises Unavailable if it does not count."""
        raise NotImplementedError

    def explained(self, requests: Sequence[Mapping[str, str]]) -> list[Json] | None:
        """Return an answer of ``kproxy explain`` to each of *requests*; None if the proxy cannot be asked."""
        return None

    def announced(self) -> str:
        """Return the caveats about the current Services; "" without any."""
        return ""

    def stacks(self) -> str:
        """Return the stacks of the proxy's threads; "" if it does not answer, or runs in this process."""
        return ""

    @property
    def is_running(self) -> bool:
        raise NotImplementedError

    def check(self) -> None:
        """Raise DriverError if the proxy ended by itself."""

    def complete_config(self, mode: str, config: Mapping[str, Any] | None) -> Json:
        """Return the KubeProxyConfiguration for *mode* with the settings of a scenario."""
        pods = ",".join(resolve("cluster_net", family) for family in self.families)
        complete = merged({**BASE_CONFIG, "clusterCIDR": pods, "mode": mode}, config)
        return merged(complete, {"kproxy": {"backendOptions": self._options}} if self._options else {})

    def start(self, mode: str, config: Mapping[str, Any] | None) -> None:
        """Start the proxy in *mode*, and return when it is ready. Raises DriverError."""
        self._settings = _settings(mode, config)
        self._start(mode, config)

    def ensure(self, mode: str, config: Mapping[str, Any] | None) -> None:
        """Have the proxy run in *mode* with *config*; it is restarted only if that is not so."""
        if self.is_running and self._settings == _settings(mode, config):
            return
        if self._settings is not None:
            self.discard()
        self.start(mode, config)

    def discard(self) -> None:
        """Stop the proxy and remove its rules: the next scenario starts on a clean node."""
        self.stop()
        self.cleanup()
        self._settings = None

    def close(self) -> None:
        """Stop the proxy, and remove objects that would outlive the node, such as BPF pins."""
        if self._settings is not None:
            self.discard()


def _settings(mode: str, config: Mapping[str, Any] | None) -> tuple[str, str]:
    return mode, json.dumps(config or {}, sort_keys=True)


class ProxyDriver(Driver):
    """A proxy that is a process of its own, started by a command line."""

    def __init__(
        self, topology: Topology, directory: Path, command: str, options: Options = NO_OPTIONS
    ) -> None:
        super().__init__(topology, directory, options)
        self._command = shlex.split(command)
        self._process: Process | None = None

    def arguments(self, mode: str, config: Path) -> list[str]:
        raise NotImplementedError

    def _start(self, mode: str, config: Mapping[str, Any] | None) -> None:
        complete = self.complete_config(mode, config)
        text = yaml.safe_dump(complete)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        path = self.directory / f"config-{mode}-{digest}.yaml"
        path.write_text(text)
        argv = [*self._command, *self.arguments(mode, path)]
        self._process = Process(self.node, argv, self.directory / "proxy.log")
        self._wait_until_healthy(int(str(complete["healthzBindAddress"]).rpartition(":")[2]))

    def _wait_until_healthy(self, port: int) -> None:
        def is_healthy() -> bool:
            self.check()
            answer = http_get(self.node, "127.0.0.1", port, "/healthz")
            return answer is not None and answer.status == 200

        if not wait_until(is_healthy, START_DEADLINE):
            raise DriverError(f"the proxy did not become healthy:\n{self._log_tail()}")

    def check(self) -> None:
        if self._process is not None and (status := self._process.exit_status) is not None:
            raise DriverError(f"the proxy exited with {status}:\n{self._log_tail()}")

    def stacks(self) -> str:
        answer = http_get(self.node, "127.0.0.1", METRICS_PORT, "/debug/pprof/goroutine?debug=2")
        return "" if answer is None else answer.body

    def _log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_status is None

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.stop(with_signal)
            self._process = None

    def cleanup(self) -> None:
        done = self.node.attempt(*self._command, "--cleanup", timeout=60 * patience())
        with (self.directory / "proxy.log").open("a") as log:
            log.write(f"--- cleanup: exit {done.returncode}\n{done.stdout}")
