"""Requests to a Service from a node and from outside, all the while, and those that failed."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kproxy_conformance.network.namespaces import Namespace
from tests.cluster.cluster import Cluster
from tests.cluster.fabric import addresses

_TIMEOUT = 3.0
_PAUSE = 0.01
_REQUEST = b"GET /hostname HTTP/1.0\r\n\r\n"
_NODE_PORT = 30080
_CLUSTER_IPS = ("10.96.0.80", "fd00:10:96::80")
_OBJECTS = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 6
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - name: web
          image: %s
          args: [netexec, --http-port=8080]
          readinessProbe: {httpGet: {path: /, port: 8080}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.0.80
  clusterIPs: [10.96.0.80, "fd00:10:96::80"]
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
"""

Target = tuple[Namespace, str, int]
"""A client, and the address and port that it dials."""


def serve(cluster: Cluster, agnhost: str) -> list[Target]:
    """Make a Service of six pods, and return who dials it how: each node, and a host outside."""
    cluster.apply(_OBJECTS % agnhost)
    cluster.kubectl("rollout", "status", "deployment/web", "--timeout=300s")
    numbers = cluster.networks
    inside = [(network, ip, 80) for network in numbers.values() for ip in _CLUSTER_IPS]
    return inside + [
        (cluster.outside, address, _NODE_PORT) for number in numbers for address in addresses(number)]


@dataclass
class Load:
    """Counts of requests. Its threads add to it."""

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, client: Namespace, host: str, port: int) -> None:
        """Make one connection, and read the answer."""
        problem = ""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with client.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(_TIMEOUT)
                connection.connect((host, port))
                connection.sendall(_REQUEST)
                if not connection.recv(4096).startswith(b"HTTP/1.0 200"):
                    problem = "no answer"
        except OSError as error:
            problem = str(error)
        with self._lock:
            self.requests += 1
            if problem:
                self.failed.append(f"{client.name} to {host}:{port}: {problem}")


@contextmanager
def under_load(targets: Sequence[Target]) -> Iterator[Load]:
    """Send requests from each client to its host and port while the block runs."""
    load = Load()
    ended = threading.Event()

    def keep_sending(client: Namespace, host: str, port: int) -> None:
        while not ended.is_set():
            load.send(client, host, port)
            time.sleep(_PAUSE)

    threads = [threading.Thread(target=keep_sending, args=target) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        ended.set()
        for thread in threads:
            thread.join()
