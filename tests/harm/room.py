"""A node with a running kproxy, Services that nobody may harm, and room for what does."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kproxy_conformance.network.cgroup import NodeCgroup
from tests.core.bpf_places import new_bpf_file_system
from tests.core.namespaces import Namespace
from tests.core.processes import Proxy
from tests.listeners import accepting, in_a_thread
from tests.patience import PATIENCE
from tests.shortage.node import Node, node

BYSTANDER, CALM, HOSTILE = "10.96.1.1", "10.96.1.2", "10.96.200.1"
"""VIPs: of a Service that changes all the time, of one that never does, and of the hostile one."""
TARGET = "10.99.255.3"
"""The endpoint of Services without harm in it."""
PORT = 8081
"""Every address of 10.99.0.0/16 and 10.100.0.0/15 answers there, and says at which address it was dialled."""
SILENT = "198.18.0.0/15"
"""Nothing there answers, and nothing refuses."""

_TURNS = ("10.99.255.1", "10.99.255.2")
_NEIGHBOUR = "192.0.2.254"
_EACH = 0.02
"""Seconds between two connections of a client."""

Json = dict[str, Any]


class Room:
    """The node, and the state of the bystander."""

    def __init__(self, here: Node) -> None:
        self.here = here
        self.network = here.network
        self._turn = 0
        self._new = 0
        self.seconds: list[float] = []
        """How long the changes took."""

    def change(self) -> None:
        """Move the bystander to its other endpoint, and wait until a new connection reaches that."""
        self._turn = 1 - self._turn
        endpoint = _TURNS[self._turn]
        self.here.put("bystander", service("bystander", BYSTANDER, [endpoint]))
        self._await(BYSTANDER, endpoint)

    def create(self) -> None:
        """Create a Service, and wait until it answers."""
        self._new += 1
        vip = f"10.96.2.{self._new}"
        self.here.put(f"new-{self._new}", service(f"new-{self._new}", vip, [TARGET]))
        self._await(vip, TARGET)

    def _await(self, vip: str, endpoint: str) -> None:
        began = time.monotonic()
        while self.answer(vip) != endpoint:
            assert time.monotonic() < began + PATIENCE, f"{vip} is not served:\n{self.here.logged[-4000:]}"
            time.sleep(0.005)
        self.seconds.append(time.monotonic() - began)

    def answer(self, address: str, port: int = 80, timeout: float = 0.1) -> str:
        """Return which endpoint answers a new connection; "": none within *timeout* seconds."""
        with suppress(OSError), self.network.entered():
            with socket.create_connection((address, port), timeout) as client:
                return client.recv(64).decode()
        return ""

    def await_answer(self, address: str, port: int = 80) -> None:
        self.here.await_true(lambda: bool(self.answer(address, port)), f"an answer from {address}:{port}")


class Client:
    """Uses a Service all the time: by a connection that stays open, and by new ones if it *opens* any."""

    def __init__(self, network: Namespace, address: str, endpoint: str, *, opens: bool) -> None:
        self._address, self._endpoint, self._opens = address, endpoint, opens
        self.begun = threading.Event()
        """Set after the first exchange."""
        self.problems: list[str] = []
        self._network = network
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._network.entered(), self._dial() as lasting:
                while not self._ended.wait(_EACH):
                    lasting.sendall(b"x")
                    if lasting.recv(64) != b"x":
                        raise ConnectionResetError("closed by the other side")
                    if self._opens:
                        self._dial().close()
                    self.begun.set()
        except OSError as error:
            self.problems.append(str(error))

    def _dial(self) -> socket.socket:
        client = socket.create_connection((self._address, 80), PATIENCE)
        try:
            if (answer := client.recv(64).decode()) != self._endpoint:
                raise OSError(f"{answer or 'nobody'} answers, not {self._endpoint}")
        except OSError:
            client.close()
            raise
        return client


def service(
    name: str, vip: str, endpoints: Sequence[str], ports: Sequence[int] = (80,), *,
    annotations: Mapping[str, str] = {}, weights: Sequence[int] = (), local: bool = False,
    node_ports: Mapping[int, int] = {}, ingress: str = "", **spec: object,
) -> list[Json]:
    """Return a Service and its EndpointSlices. *weights*: one for each endpoint, in a slice of its own."""
    meta: Json = {"name": name, "namespace": "shop"}
    served: list[Json] = [
        {"name": f"p{each}", "port": each, **({"nodePort": node_ports[each]} if each in node_ports else {})}
        for each in ports
    ]
    items: list[Json] = [{
        "apiVersion": "v1", "kind": "Service", "metadata": meta | {"annotations": dict(annotations)},
        "spec": {"clusterIP": vip, "ports": served, **({"type": "NodePort"} if node_ports else {}), **spec},
        **({"status": {"loadBalancer": {"ingress": [{"ip": ingress}]}}} if ingress else {}),
    }]
    size = 1 if weights else max(1, min(1000, 20_000 // len(ports)))
    for at in range(0, len(endpoints), size):
        weight = {"annotations": {"service.cilium.io/weight": str(weights[at])}} if weights else {}
        items.append({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": f"{name}-{at}", "namespace": "shop", **weight,
                         "labels": {"kubernetes.io/service-name": name}},
            "endpoints": [{"addresses": [each], **({"nodeName": "here"} if local else {})}
                          for each in endpoints[at:at + size]],
            "ports": [{"name": each["name"], "port": PORT} for each in served],
        })
    return items


def addresses(network: str, count: int, size: int = 250) -> list[str]:
    """Return *count* addresses; *network* is the first half of the first."""
    first, second = map(int, network.split("."))
    return [f"{first}.{second + at // (size * size)}.{at // size % size}.{at % size + 1}"
            for at in range(count)]


def peak_memory(proxy: Proxy) -> int:
    """Return the highest resident memory of a proxy and of each of its children, in bytes."""
    return sum(map(_peak, [proxy.pid, *children(proxy)]))


def children(proxy: Proxy) -> list[int]:
    tasks = Path(f"/proc/{proxy.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def _peak(pid: int) -> int:
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


@contextmanager
def room(
    directory: Path, mode: str, *, own_tables: str = "auto", **options: object
) -> Iterator[Room]:
    """A room without a running proxy."""
    with ExitStack() as stack:
        cgroup: NodeCgroup | None = None
        backend_options: dict[str, object] = {}
        if mode == "ebpf":
            cgroup = NodeCgroup()
            stack.callback(cgroup.close)
            pins = stack.enter_context(new_bpf_file_system(directory / "bpf"))
            backend_options = {"ebpf": {"cgroup": str(cgroup.path), "pinDirectory": str(pins / "kproxy")}}
        here = stack.enter_context(node(
            directory, mode, own_tables=own_tables, cgroup=cgroup, backend_options=backend_options,
            section={}, **options))
        here.network.ip(
            "route add local 10.99.0.0/16 dev lo", "route add local 10.100.0.0/15 dev lo",
            f"neigh add {_NEIGHBOUR} lladdr 02:00:00:00:00:02 dev node0 nud permanent",
            f"route add {SILENT} via {_NEIGHBOUR}",
        )  # fmt: skip
        listener = here.network.inside(lambda: socket.create_server(("", PORT), backlog=1024))
        stack.enter_context(accepting(listener, in_a_thread(_echo)))
        here.put("bystander", service("bystander", BYSTANDER, [_TURNS[0]]))
        here.put("calm", service("calm", CALM, [TARGET]))
        yield Room(here)


@contextmanager
def repeated(act: Callable[[], object], seconds: float) -> Iterator[None]:
    """Do something every *seconds* on average, the first time at once."""
    ended = threading.Event()
    act()
    began = time.monotonic()

    def repeat() -> None:
        for number in itertools.count(1):
            if ended.wait(max(0.0, began + number * seconds - time.monotonic())):
                return
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _echo(client: socket.socket) -> None:
    with client, suppress(OSError):
        client.sendall(client.getsockname()[0].encode())
        while data := client.recv(4096):
            client.sendall(data)
