"""The cost of connect() and datagrams through a ClusterIP in ebpf mode, through its rules, and directly.

    .venv/bin/python -m tests.bench.sockets [ROUNDS [counting]]

*counting*: one kproxy without and one with ``trafficMetrics``, side by side.

As root. Makes network namespaces and cgroups, and removes them. All ways are measured in turn, in one
thread: figures of separate runs differ by more than what is measured.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import yaml

from kproxy_conformance.processes import own_name
from tests.core.bpf_places import cgroup2_tree
from tests.core.namespaces import Namespace, namespace

CLIENT, SERVER, VIP, PORT = "192.0.2.1", "192.0.2.2", "10.96.0.10", 8080
BATCH = 60
"""Sockets of each way that are made at once: a socket keeps the cgroup in which it was made."""

Operation = Callable[[socket.socket, str], None]


def connect(client: socket.socket, address: str) -> None:
    """Open one TCP connection."""
    client.connect((address, PORT))


def connect_and_end(client: socket.socket, address: str) -> None:
    """Open one TCP connection, end it, and wait until the server has."""
    connect(client, address)
    client.shutdown(socket.SHUT_WR)
    client.recv(1)


def exchange(client: socket.socket, address: str) -> None:
    """Send a byte over a connection and wait for the answer, twenty times."""
    for _ in range(20):
        client.send(b"x")
        client.recv(10)


def datagram(client: socket.socket, address: str) -> None:
    """Send one datagram, and wait for the answer."""
    client.sendto(b"x", (address, PORT))
    client.recvfrom(10)


def known_flow(client: socket.socket, address: str) -> None:
    """Exchange twenty datagrams after the first."""
    for _ in range(20):
        datagram(client, address)


class Way(NamedTuple):
    """A way to the server. *is_translated*: by programs. *is_counted*: by the second kproxy."""

    address: str
    is_translated: bool
    is_counted: bool = False


class Stage(NamedTuple):
    """The namespace of clients, and the cgroup in which programs translate."""

    client: Namespace
    cgroup: Path


WAYS = {"direct": Way(SERVER, False), "rules": Way(VIP, False), "ebpf": Way(VIP, True)}
WAYS_OF_COUNTING = WAYS | {f"{name}, counted": way._replace(is_counted=True) for name, way in WAYS.items()}


def main(rounds: int, variant: str) -> None:
    """Print a table of medians in microseconds, and ratios to the direct way."""
    ways = WAYS_OF_COUNTING if variant == "counting" else WAYS
    with ExitStack() as stack:
        home = stack.enter_context(_home())
        stages = [stack.enter_context(_stage(home / "node", "off"))]
        if variant == "counting":
            stages.append(stack.enter_context(_stage(home / "counted", "service")))
        for what, kind, warm, operation, repeats in (
            ("TCP connect()", socket.SOCK_STREAM, None, connect, 1),
            ("TCP, whole life", socket.SOCK_STREAM, None, connect_and_end, 1),
            ("TCP, established", socket.SOCK_STREAM, connect, exchange, 20),
            ("UDP, new socket", socket.SOCK_DGRAM, None, datagram, 1),
            ("UDP, known flow", socket.SOCK_DGRAM, datagram, known_flow, 20),
        ):
            play = partial(_rounds, ways, rounds, stages, kind, operation, warm=warm)
            times = stages[0].client.inside(play)
            medians = {way: statistics.median(found) / repeats / 1000 for way, found in times.items()}
            direct = medians["direct"]
            row = "   ".join(f"{way} {us:6.2f} us ({us / direct:4.2f})" for way, us in medians.items())
            print(f"{what:16} {row}")


def _rounds(
    ways: Mapping[str, Way], rounds: int, stages: Sequence[Stage], kind: socket.SocketKind,
    operation: Operation, *, warm: Operation | None,
) -> dict[str, list[int]]:
    """Return how many nanoseconds each operation took, by way."""
    times: dict[str, list[int]] = {way: [] for way in ways}
    thread = str(threading.get_native_id())
    for _ in range(rounds):
        sockets = {}
        for way, (_, is_translated, is_counted) in ways.items():
            client, cgroup = stages[is_counted]
            (cgroup if is_translated else cgroup.parent).joinpath("cgroup.threads").write_text(thread)
            with client.joined():
                sockets[way] = [socket.socket(socket.AF_INET, kind) for _ in range(BATCH)]
        for at in range(BATCH):
            for way in random.sample(list(ways), len(ways)):  # One leaves its code in the processor's caches.
                sock, address = sockets[way][at], ways[way].address
                if warm is not None:
                    warm(sock, address)
                begun = time.perf_counter_ns()
                operation(sock, address)
                times[way].append(time.perf_counter_ns() - begun)
                sock.close()
    return times


@contextmanager
def _home() -> Iterator[Path]:
    """Move this process to a new cgroup, and back."""
    home = cgroup2_tree() / own_name("bench")
    home.mkdir()
    (home / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield home
    finally:
        (cgroup2_tree() / "cgroup.procs").write_text(str(os.getpid()))
        home.rmdir()


@contextmanager
def _stage(cgroup: Path, counting: str) -> Iterator[Stage]:
    """Two namespaces, and kproxy in ebpf mode in the client's, for sockets of the new *cgroup*."""
    cgroup.mkdir()
    try:
        (cgroup / "cgroup.type").write_text("threaded")
        with (
            namespace() as client, namespace() as server,
            tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory,
        ):  # fmt: skip
            client.ip(f"link add eth0 type veth peer name eth0 netns {server.name}",
                      f"address add {CLIENT}/24 dev eth0", "link set eth0 up",
                      f"route add default via {SERVER}")  # fmt: skip
            server.ip(f"address add {SERVER}/24 dev eth0", "link set eth0 up")
            server.inside(_serve)
            with _proxy(client, Path(directory), cgroup, counting):
                yield Stage(client, cgroup)
    finally:
        cgroup.rmdir()


def _serve() -> None:
    listener = socket.create_server(("", PORT), backlog=1024)
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", PORT))

    def accept() -> None:
        while True:
            threading.Thread(target=echo_all, args=(listener.accept()[0],), daemon=True).start()

    def echo_all(connection: socket.socket) -> None:
        with connection, suppress(ConnectionResetError):
            while said := connection.recv(100):
                connection.send(said)

    def answer() -> None:
        while True:
            echo.sendto(*echo.recvfrom(100))

    for loop in (accept, answer):
        threading.Thread(target=loop, daemon=True).start()


@contextmanager
def _proxy(client: Namespace, directory: Path, cgroup: Path, counting: str) -> Iterator[None]:
    ports = [("tcp", "TCP"), ("udp", "UDP")]
    objects = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"},
         "status": {"addresses": [{"type": "InternalIP", "address": CLIENT}]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"},
         "spec": {"clusterIP": VIP, "ports": [
             {"name": name, "port": PORT, "protocol": protocol} for name, protocol in ports]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
         "metadata": {"name": "web-1", "namespace": "default",
                      "labels": {"kubernetes.io/service-name": "web"}},
         "endpoints": [{"addresses": [SERVER]}],
         "ports": [{"name": name, "port": PORT, "protocol": protocol} for name, protocol in ports]},
    ]  # fmt: skip
    manifests = directory / "manifests"
    manifests.mkdir()
    for number, made in enumerate(objects):
        (manifests / f"{number}.json").write_text(json.dumps(made))
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "clusterCIDR": "10.244.0.0/16",
        "kproxy": {"backendOptions": {"ebpf": {"cgroup": str(cgroup)}}, "trafficMetrics": counting,
                   "stateDirectory": str(directory / "state")},
    }))  # fmt: skip
    kproxy = str(Path(sys.executable).with_name("kproxy"))
    process = subprocess.Popen([
        "ip", "netns", "exec", client.name, kproxy, "--mode=ebpf", f"--config={config}",
        f"--manifests={manifests}", "--hostname-override=node1"], stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        while not client.inside(_is_ready):
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def _is_ready() -> bool:
    try:
        with socket.create_connection(("127.0.0.1", 10256), 1) as page:
            page.sendall(b"GET /healthz HTTP/1.1\r\nHost: node1\r\nConnection: close\r\n\r\n")
            return b" 200 " in page.recv(100)
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, sys.argv[2] if len(sys.argv) > 2 else "")
