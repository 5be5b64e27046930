"""A whole proxy on a node of its own, and what its API server can do to it."""

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kproxy_conformance.apiserver.objects import Options, generate
from tests.core.api_servers import BenchServer
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE

KPROXY = str(Path(sys.executable).with_name("kproxy"))
CLIENT, POD_PORT = "10.128.0.1", 8080
FIRST, SECOND, BAD = "10.96.0.10", "10.96.0.11", "10.96.9.9"
"""ClusterIPs: the first two Services of the bench's server have these."""
SLICE = "bench-0000/svc-000000-000"


def wait_until(what: Callable[[], bool], meaning: str) -> None:
    asked = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if what():
            return
        asked.wait(0.02)
    raise AssertionError(f"never came true: {meaning}")


class Node:
    """A node that *is* every pod, and has nothing else: what no rule leads elsewhere is lost."""

    def __init__(self, inside: Namespace) -> None:
        self.inside = inside
        inside.ip("link add out type veth peer name nowhere", "link set out up",
                  f"address add {CLIENT}/32 dev out", f"route add default dev out src {CLIENT}",
                  "route add local 10.128.0.0/9 dev lo")
        self._pods = inside.inside(lambda: socket.create_server(("", POD_PORT)))
        self._pods.settimeout(PATIENCE)

    def close(self) -> None:
        self._pods.close()

    def answers(self, cluster_ip: str) -> str | None:
        """The endpoint that answers at *cluster_ip*; None: none does."""
        def dial() -> socket.socket | None:
            client = socket.socket()
            client.settimeout(0.2)
            if client.connect_ex((cluster_ip, 80)):
                client.close()
                return None
            return client

        client = self.inside.inside(dial)
        if client is None:
            return None
        with client, self._pods.accept()[0] as server:
            return str(server.getsockname()[0])

    def await_answer(self, cluster_ip: str, endpoint: str) -> None:
        """Return once *endpoint*, and so what came before it, is programmed."""
        wait_until(lambda: self.answers(cluster_ip) == endpoint, f"{endpoint} answers at {cluster_ip}")

    def health(self) -> int:
        """Return the status; 0: no process listens yet."""
        connection = http.client.HTTPConnection("127.0.0.1", 10256, timeout=PATIENCE)
        try:
            self.inside.inside(connection.connect)
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()

    def metrics(self) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", 10249, timeout=PATIENCE)
        try:
            self.inside.inside(connection.connect)
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()


class Proxy:
    """A running kproxy, and what it logs."""

    def __init__(self, node: Node, *options: str) -> None:
        command = [KPROXY, "--mode=nftables", "--cluster-cidr=10.128.0.0/9", "--hostname-override=kb-node-0"]
        self._process = subprocess.Popen(["ip", "netns", "exec", node.inside.name, *command, *options],
                                         stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def logged(self, what: str) -> list[str]:
        with self._changed:
            return [line for line in self._lines if what in line]

    def await_log(self, what: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: any(what in line for line in self._lines), PATIENCE)
            assert found, "".join(self._lines)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for line in self._process.stderr:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()


@pytest.fixture
def node() -> Iterator[Node]:
    with namespace() as inside:
        node = Node(inside)
        yield node
        node.close()


@pytest.fixture
def server(node: Node) -> Iterator[BenchServer]:
    server = BenchServer("--gen", "services=2,endpoints=1", node=node.inside)
    yield server
    server.stop()


@pytest.fixture
def run(node: Node) -> Iterator[Callable[..., Proxy]]:
    started: list[Proxy] = []

    def run(*options: str) -> Proxy:
        started.append(proxy := Proxy(node, *options))
        return proxy
    yield run
    for proxy in started:
        proxy.close()


def move(server: BenchServer, address: str) -> None:
    """Give the first Service another endpoint."""
    server.post("set", ops=[{"slice": SLICE, "index": 0, "address": address}])


def test_a_node_serves_while_the_api_server_is_away_and_logs_that_once(
    node: Node, server: BenchServer, run: Callable[..., Proxy],
) -> None:
    proxy = run(f"--master={server.url}")
    move(server, "10.192.0.1")
    node.await_answer(FIRST, "10.192.0.1")
    wait_until(lambda: node.health() == 200, "the proxy is healthy")
    server.stop()
    proxy.await_log("cannot follow the API server")
    assert node.answers(FIRST) == "10.192.0.1"
    assert node.answers(SECOND)
    assert node.health() == 200
    server.start("--gen", "services=3,endpoints=1")
    move(server, "10.192.0.2")
    node.await_answer(FIRST, "10.192.0.2")
    proxy.await_log("following the API server again")
    assert len(proxy.logged("cannot follow the API server")) == 1
    assert len(proxy.logged("following the API server again")) == 1
    assert node.health() == 200


def test_a_proxy_that_starts_before_its_api_server_serves_cached_objects(
    node: Node, server: BenchServer, run: Callable[..., Proxy],
) -> None:
    first = run(f"--master={server.url}")
    move(server, "10.192.0.1")
    node.await_answer(FIRST, "10.192.0.1")
    first.close()
    server.stop()
    second = run(f"--master={server.url}")
    second.await_log("cannot follow the API server")
    assert node.answers(FIRST) == "10.192.0.1"
    server.start("--gen", "services=2,endpoints=1")
    move(server, "10.192.0.2")
    node.await_answer(FIRST, "10.192.0.2")


def test_an_outage_after_which_all_pods_are_marked_not_ready_refuses_no_connection(
    node: Node, server: BenchServer, run: Callable[..., Proxy], tmp_path: Path,
) -> None:
    """As on a real cluster, whose controller manager misses the leases of nodes while the server is away."""
    config = tmp_path / "config.yaml"
    config.write_text("{apiVersion: kubeproxy.config.k8s.io/v1alpha1, kind: KubeProxyConfiguration, "
                      "mode: nftables, clusterCIDR: 10.128.0.0/9, kproxy: {lastResort: 1h}}")
    made = "services=1,endpoints=3"
    (piece,) = generate(Options.parse(made))["endpointslices"]
    server.stop()
    server.start("--gen", made)
    proxy = run(f"--master={server.url}", f"--config={config}")
    wait_until(lambda: bool(node.answers(FIRST)), "an endpoint answers")

    def mark(*are_ready: bool) -> None:
        for endpoint, is_ready in zip(piece["endpoints"], are_ready, strict=True):
            endpoint["conditions"] = {"ready": is_ready, "serving": is_ready, "terminating": False}
        server.post("apply", **piece)

    def outage() -> None:
        server.stop()
        proxy.await_log("cannot follow the API server")
        server.start("--gen", made)
        proxy.await_log("following the API server again")
        for are_ready in ((False, True, True), (False, False, True), (False, False, False)):
            mark(*are_ready)
        proxy.await_log("no endpoint is ready, using those that were ready last")
        for are_ready in ((False, False, True), (True, True, True)):
            mark(*are_ready)
        proxy.await_log("last resort has ended")

    with ThreadPoolExecutor(1) as others:
        going_on = others.submit(outage)
        answers = [node.answers(FIRST)]
        while not going_on.done():
            answers.append(node.answers(FIRST))
        going_on.result()
    assert None not in answers
    assert len(set(answers)) == 3


def test_an_endpoint_port_of_70000_affects_no_other_service(
    node: Node, server: BenchServer, run: Callable[..., Proxy],
) -> None:
    def bad_slice(port: int) -> None:
        server.post("apply", kind="EndpointSlice", addressType="IPv4",
                    metadata={"namespace": "default", "name": "bad-1",
                              "labels": {"kubernetes.io/service-name": "bad"}},
                    endpoints=[{"addresses": ["10.128.9.9"]}],
                    ports=[{"name": "", "port": port, "protocol": "TCP"}])

    server.post("apply", kind="Service", metadata={"namespace": "default", "name": "bad"},
                spec={"type": "ClusterIP", "clusterIP": BAD, "clusterIPs": [BAD], "ipFamilies": ["IPv4"],
                      "ports": [{"port": 80, "protocol": "TCP"}]})
    bad_slice(70000)
    proxy = run(f"--master={server.url}")
    for address in ("10.192.0.1", "10.192.0.2"):
        move(server, address)
        node.await_answer(FIRST, address)
    assert node.answers(SECOND)
    assert node.answers(BAD) is None
    wait_until(lambda: node.health() == 200, "the proxy is healthy")
    proxy.await_log("ports[0].port")
    assert any("default/bad-1" in line and "70000" in line for line in proxy.logged("ports[0].port"))
    bad_slice(POD_PORT)
    node.await_answer(BAD, "10.128.9.9")


def test_requests_to_the_api_server_are_counted_as_client_go_does(
    node: Node, server: BenchServer, run: Callable[..., Proxy],
) -> None:
    run(f"--master={server.url}")
    move(server, "10.192.0.1")
    node.await_answer(FIRST, "10.192.0.1")
    wait_until(lambda: node.health() == 200, "the proxy is healthy")
    host = server.url.removeprefix("http://")
    assert f'rest_client_requests_total{{code="200",host="{host}",method="GET"}} 4' in node.metrics()
