"""A connection through a service port that only one backend knows, which proves that its rules work."""

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kproxy_core.backend.api import Scope, Update
from kproxy_core.model.address import Address, Protocol, format_address, format_socket
from kproxy_core.model.endpoint import Destination
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan

KEY = ServicePortKey("kproxy", "mode-switch", "probe", Protocol.TCP)

_ATTEMPTS = 3
_PATIENCE = 1.0
"""Seconds for one attempt."""


class ProbeFailed(Exception):
    """The rules did not take the connection to its endpoint."""


class ProbeImpossible(Exception):
    """No VIP to connect to, or no route to it."""


class Probe:
    """An unused port of a ClusterIP in *full*, with an endpoint in this process."""

    def __init__(self, full: Update, addresses: frozenset[Address]) -> None:
        """*addresses* are this machine's. Raises ProbeImpossible."""
        self._full = full
        self._word = secrets.token_bytes(16)
        vip = next((p.cluster_ip for p in full.plans.values() if p.cluster_ip is not None), None)
        if vip is None:
            raise ProbeImpossible("there is no Service with a ClusterIP")
        own = full.node.node_ip
        if own is None or own not in addresses:
            raise ProbeImpossible("the node's address is not on this machine")
        self._vip = vip
        self._listener = socket.create_server((format_address(own), 0), family=full.family.af)
        self._port = self._listener.getsockname()[1]
        self._endpoint = Destination(own, self._port)
        if any(p.cluster_ip == vip and p.port == self._port for p in full.plans.values()):
            self._listener.close()
            raise ProbeImpossible(f"{self} belongs to a Service")

    def __str__(self) -> str:
        return format_socket(self._vip, self._port)

    @property
    def addition(self) -> Update:
        """The update that adds the probe's service port."""
        plan = ServicePlan(
            key=KEY, family=self._full.family, created="", port=self._port, cluster_ip=self._vip,
            cluster=(self._endpoint,), hairpins=(self._endpoint.address,), has_endpoints=True,
        )  # fmt: skip
        return self._update(plan)

    @property
    def removal(self) -> Update:
        """The update that removes it."""
        return self._update(None)

    def connect(self) -> None:
        """Connect, and check who answers. Raises ProbeFailed, or ProbeImpossible without a route."""
        with self._answering():
            problem = ""
            for _ in range(_ATTEMPTS):
                try:
                    problem = self._attempt()
                except OSError as error:
                    problem = str(error)
                if not problem:
                    return
            raise ProbeFailed(f"{self} did not reach its endpoint: {problem}")

    def close(self) -> None:
        self._listener.close()

    def _attempt(self) -> str:
        """Return the reason why an attempt failed; "" if it succeeded."""
        with socket.socket(self._full.family.af) as connection:
            connection.settimeout(_PATIENCE)
            try:
                connection.connect((format_address(self._vip), self._port))
            except OSError as error:
                if "unreachable" in str(error):
                    raise ProbeImpossible(f"no route to {self}") from error
                raise
            found = connection.recv(len(self._word))
        return "" if found == self._word else "another process answered"

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Answer connections to our endpoint with the word."""
        ended = threading.Event()

        def answer() -> None:
            self._listener.settimeout(0.1)
            while not ended.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    continue
                with connection:
                    connection.sendall(self._word)

        thread = threading.Thread(target=answer, name="kproxy-probe", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _update(self, plan: ServicePlan | None) -> Update:
        plans = self._full.plans if plan is None else {**self._full.plans, KEY: plan}
        return Update(self._full.family, Scope.CHANGED, self._full.node, {KEY: plan}, plans)
