"""A node with an endpoint of its own and a running kproxy, from which things are taken away."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kproxy_conformance.network.cgroup import NodeCgroup
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import KPROXY, Proxy, started
from tests.listeners import accepting, in_a_thread
from tests.patience import PATIENCE

ENDPOINT, ENDPOINT6, PORT = "10.1.2.3", "fd00:1::3", 8080
Json = dict[str, Any]
MODES = ("nftables", "iptables", "userspace")


class Node:
    """A network namespace with an endpoint, manifests, and a kproxy that can be restarted."""

    def __init__(
        self, network: Namespace, directory: Path, mode: str, options: Mapping[str, object],
        section: Mapping[str, object], own_tables: str,
    ) -> None:
        self.network = network
        self.directory = directory
        self.log = directory / "kproxy.log"
        self._manifests = directory / "manifests"
        self._manifests.mkdir()
        self._config = directory / "config.conf"
        self._configuration: Json = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode,
            "conntrack": {"maxPerCore": 0}, **options,
        }  # fmt: skip
        self._own_section = {"stateDirectory": str(directory / "state"), **section}
        self.configure(own_tables)

    def configure(self, own_tables: str = "auto", mode: str = "") -> None:
        """Write the configuration of the next process. *mode* "": that of the last one."""
        if mode:
            self._configuration["mode"] = mode
        section = self._own_section | {"ownTables": own_tables}
        self._config.write_text(json.dumps(self._configuration | {"kproxy": section}))

    def serve(self, number: int, node_port: int = 0) -> None:
        """Write a Service, which `vip` names, and its endpoint."""
        self.put(f"web-{number}", _objects(number, node_port))

    def serve6(self, number: int) -> None:
        """Write an IPv6 Service, which `vip6` names, and its endpoint."""
        self.put(f"six-{number}", _objects(number, name="six", address=vip6(number), endpoint=ENDPOINT6))

    def delete(self, number: int) -> None:
        """Delete a Service that `serve` wrote."""
        (self._manifests / f"web-{number}.json").unlink()

    def serve_many(self, first: int, count: int) -> None:
        """Write *count* Services as one file."""
        numbers = range(first, first + count)
        self.put(f"many-{first}", [item for number in numbers for item in _objects(number)])

    def put(self, name: str, items: Sequence[Json]) -> None:
        """Write objects as one file, or replace it."""
        self.put_text(f"{name}.json", json.dumps({"kind": "List", "apiVersion": "v1", "items": items}))

    def put_text(self, name: str, text: str) -> None:
        """Replace a file as editors do, so that no reader sees a part of it."""
        new = self._manifests.with_name(f"{name}.new")
        new.write_text(text)
        new.rename(self._manifests / name)

    @contextmanager
    def proxy(
        self, *arguments: str, environment: Mapping[str, str] = {}, under: Sequence[str | Path] = ()
    ) -> Iterator[Proxy]:
        """Yield a healthy kproxy, started by the command *under*. Its log is `logged`."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        log = f'exec "$@" 2>>{self.log}'
        command = [
            *self._inside, "env", *variables, "sh", "-c", log, "sh", *map(str, under), KPROXY, "--config",
            str(self._config), "--manifests", str(self._manifests), "--hostname-override", "here", *arguments,
        ]  # fmt: skip
        with started(self.network, command) as proxy:
            proxy.await_health()
            yield proxy

    def command(self, *arguments: str, under: Sequence[str | Path] = ()) -> str:
        """Run a command of kproxy, and return its output."""
        command = [*self._inside, *map(str, under), KPROXY, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def _inside(self) -> list[str]:
        """The begin of a command that sees the machine's mounts, which ``ip netns exec`` hides in part."""
        return ["nsenter", f"--net=/run/netns/{self.network.name}"]

    @property
    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def await_log(self, pattern: str) -> None:
        """Wait until the log matches *pattern*."""
        self.await_true(lambda: bool(re.search(pattern, self.logged)), pattern)

    def await_answer(self, address: str, port: int = 80) -> None:
        """Wait until a connection is answered by the endpoint."""
        self.await_true(lambda: self.answers(address, port), f"an answer from {address}")

    def await_true(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, f"no {what}:\n{self.logged[-4000:]}"
            time.sleep(0.05)

    def answers(self, address: str, port: int = 80) -> bool:
        """Return whether a new connection is answered by the endpoint."""
        with suppress(OSError), self.dial(address, port) as client:
            client.settimeout(PATIENCE)
            return client.recv(1) == b"!"
        return False

    def dial(self, address: str, port: int = 80) -> socket.socket:
        return self.network.inside(lambda: socket.create_connection((address, port), 1.0))


def vip(number: int) -> str:
    return f"10.96.{number // 250}.{1 + number % 250}"


def vip6(number: int) -> str:
    return f"fd00:96::{number:x}"


def _objects(
    number: int, node_port: int = 0, *, name: str = "web", address: str = "", endpoint: str = ENDPOINT
) -> list[Json]:
    """Return a Service, and its endpoint. *address* "": that of `vip`."""
    spec: Json = {"clusterIP": address or vip(number), "ports": [{"port": 80}]}
    if node_port:
        spec |= {"type": "NodePort", "ports": [{"port": 80, "nodePort": node_port}]}
    meta: Json = {"name": f"{name}-{number}", "namespace": "shop"}
    return [
        {"apiVersion": "v1", "kind": "Service", "spec": spec, "metadata": meta},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
         "addressType": "IPv6" if ":" in endpoint else "IPv4",
         "metadata": meta | {"labels": {"kubernetes.io/service-name": meta["name"]}},
         "endpoints": [{"addresses": [endpoint]}], "ports": [{"port": PORT}]},
    ]  # fmt: skip


@contextmanager
def node(
    directory: Path, mode: str, *, backend_options: Mapping[str, object] = {}, own_tables: str = "auto",
    section: Mapping[str, object] = {}, cgroup: NodeCgroup | None = None, **options: object,
) -> Iterator[Node]:
    """A node with an uplink, routes for VIPs, and an endpoint in each family that greets and echoes.

    Its sockets, except those of kproxy, are in *cgroup*.
    """
    with ExitStack() as stack:
        network = stack.enter_context(namespace(cgroup))
        network.ip(
            f"address add {ENDPOINT}/32 dev lo", f"address add {ENDPOINT6}/128 dev lo nodad",
            "link add node0 type veth peer name lan0", "link set node0 up", "link set lan0 up",
            "address add 192.0.2.1/24 dev node0", "route add default via 192.0.2.254",
            "address add 2001:db8::1/64 dev node0 nodad", "route add ::/0 via 2001:db8::fe dev node0",
        )  # fmt: skip
        for family, address in ((socket.AF_INET, ENDPOINT), (socket.AF_INET6, ENDPOINT6)):
            listener = network.inside(
                partial(socket.create_server, (address, PORT), family=family, backlog=1024))
            stack.enter_context(accepting(listener, in_a_thread(_echo)))
        yield Node(
            network, directory, mode, options, {"backendOptions": backend_options, **section}, own_tables)


def _echo(client: socket.socket) -> None:
    with client, suppress(OSError):
        client.sendall(b"!")
        while data := client.recv(4096):
            client.sendall(data)
