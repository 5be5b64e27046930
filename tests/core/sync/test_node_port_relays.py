"""Node ports on loopback, relayed by a worker process."""

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from queue import SimpleQueue

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_conformance.network.addresses import ADDRESSES
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.processes import children
from kproxy_core.contract.values import Scope, Update
from kproxy_core.linux.relay.orders import Serve, WorkerSettings
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServiceName, ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_core.sync.node_port_relays import NodePortRelays
from tests.core.namespaces import Namespace, own_network
from tests.listeners import accepting
from tests.patience import PATIENCE

__all__ = ["own_network"]

NODE = replace(node_view(), relays_node_ports=True)
UNASKED = node_view()

Plans = Mapping[ServicePortKey, ServicePlan]


class Asking:
    """A backend that wants node ports of *protocols* relayed."""

    def __init__(self, *protocols: Protocol) -> None:
        self._protocols = protocols

    def wants_relays(self, family: Family, protocol: Protocol) -> bool:
        return protocol in self._protocols


BOTH = Asking(Protocol.TCP, Protocol.UDP)


class Rig:
    """Relays, and a loop that makes their calls when it is told to."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.delayed: list[tuple[float, Callable[[], None]]] = []
        self.events: list[tuple[ServiceName, str]] = []
        self.shown: dict[Family, str] = {}
        self.relays = NodePortRelays(
            lambda service, problem: self.events.append((service, problem)), self.shown.__setitem__,
            self.calls.put,
            lambda seconds, call: self.delayed.append((seconds, call)))

    def resync(self, of: Plans, node: NodeView = NODE, backend: Asking = BOTH) -> None:
        self.relays.update_succeeded(backend, full_update(node, of))
        self.settle()

    def change(self, changed: Mapping[ServicePortKey, ServicePlan | None], of: Plans) -> None:
        self.relays.update_succeeded(BOTH, Update(NODE.family, Scope.CHANGED, NODE, changed, of))
        self.settle()

    def make_delayed_calls(self) -> list[float]:
        """Make the calls that are due later. Return their delays."""
        due, self.delayed = self.delayed, []
        for _, call in due:
            call()
        self.settle()
        return [seconds for seconds, _ in due]

    def settle(self) -> None:
        """Have the worker process answer, and make the calls that follow."""
        assert self.relays.await_answers(PATIENCE)
        while not self.calls.empty():
            self.calls.get()()

    def await_exit(self) -> None:
        """Wait for the call that tells of the exit of a worker process, and make it."""
        self.calls.get(timeout=PATIENCE)()
        self.settle()

    def metrics(self) -> dict[str, float]:
        prefix = "kubeproxy_nftables_localhost_nodeport_"
        return {each.name.removeprefix(prefix): each.value
                for each in self.relays.measure() if each.name.startswith(prefix)}

    def own_metric(self, name: str) -> float:
        (value,) = (each.value for each in self.relays.measure()
                    if each.name == f"kproxy_localhost_node_port_{name}")
        return value


@pytest.fixture
def rig(own_network: None) -> Iterator[Rig]:
    made = Rig()
    with closing(made.relays):
        yield made


@contextmanager
def answering(name: str) -> Iterator[str]:
    """Yield the port of an endpoint that sends its *name*."""
    def serve(client: socket.socket) -> None:
        with client:
            client.sendall(name.encode())

    server = socket.create_server(("127.0.0.1", 0))
    with accepting(server, serve):
        yield str(server.getsockname()[1])


def web(port: str, name: str = "web", node_port: int = 30080) -> dict[ServicePortKey, ServicePlan]:
    return plans(NODE, service(name, f"80@{node_port}"), endpoint_slice(name, "127.0.0.1", ports=(port,)))


def reached(port: int = 30080) -> str:
    """Return the name of the endpoint that answers on loopback; "" if none does."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
            return connection.recv(100).decode()
    except ConnectionRefusedError:
        return ""


def test_a_process_runs_only_while_a_node_port_is_relayed(rig: Rig) -> None:
    before = children(os.getpid())
    with answering("a") as a:
        rig.resync(web(a), node=UNASKED)
        rig.resync(web(a), backend=Asking())
        rig.resync(plans(NODE, service("web", "80"), endpoint_slice("web", "127.0.0.1", ports=(a,))))
        rig.resync(plans(NODE, service("web", "80/SCTP@30080"), endpoint_slice(
            "web", "127.0.0.1", ports=(f"{a}/SCTP",))))
        rig.resync(plans(NODE, service("web", "80@30080")))
        assert (children(os.getpid()), reached(), rig.metrics().get("listeners")) == (before, "", 0)
        rig.resync(web(a))
        assert len(children(os.getpid()) - before) == 1
        assert (reached(), rig.metrics()["listeners"]) == ("a", 1)
        rig.change(dict.fromkeys(web(a)), {})
        assert reached() == ""
        deadline = time.monotonic() + PATIENCE
        while children(os.getpid()) != before:  # It may not have seen the end of the connection yet.
            assert time.monotonic() < deadline
            rig.make_delayed_calls()


def test_an_endpoint_that_is_replaced_is_not_dialled_any_more(rig: Rig) -> None:
    with answering("a") as a, answering("b") as b:
        rig.resync(web(a))
        rig.change(web(b), web(b))
        assert {reached() for _ in range(4)} == {"b"}


def test_a_node_port_may_move_to_another_service(rig: Rig) -> None:
    with answering("a") as a, answering("b") as b:
        rig.resync(web(a))
        after = {**web(b, "other"), **web(a, node_port=30081)}
        rig.change(after, after)
        assert (reached(), reached(30081)) == ("b", "a")
        assert rig.events == []


def test_a_port_of_another_process_is_reported_counted_and_taken_once_it_is_free(rig: Rig) -> None:
    with answering("a") as a:
        with socket.create_server(("127.0.0.1", 30080)):
            rig.resync({**web(a), **web(a, "other", 30081)})
            problem = "default/web is not served on 127.0.0.1:30080: [Errno 98] Address already in use"
            assert [(str(name), said) for name, said in rig.events] == [("default/web", problem)]
            assert rig.shown == {Family.IPV4: problem, Family.IPV6: ""}
            assert rig.relays.problem(NODE.family, *web(a)) == problem
            assert rig.relays.problem(NODE.family, *web(a, "other")) == ""
            assert reached(30081) == "a"
            assert rig.metrics() == {"listeners": 1, "listener_creation_failures_total": 1}
            assert rig.make_delayed_calls() == [1]
            assert rig.metrics() == {"listeners": 1, "listener_creation_failures_total": 2}
        assert rig.make_delayed_calls() == [2]
        assert reached() == "a"
        assert rig.relays.problem(NODE.family, *web(a)) == ""
        assert (rig.shown[Family.IPV4], rig.metrics()["listeners"], rig.delayed) == ("", 2, [])


def test_a_process_that_exits_is_replaced(rig: Rig) -> None:
    before = children(os.getpid())
    with answering("a") as a:
        rig.resync(web(a))
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGKILL)
        rig.await_exit()
        assert children(os.getpid()) - before - {pid}
        assert (reached(), rig.own_metric("worker_exits_total")) == ("a", 1)


def test_a_taken_port_keeps_no_process_from_being_replaced(rig: Rig) -> None:
    before = children(os.getpid())
    with answering("a") as a, socket.create_server(("127.0.0.1", 30081)):
        rig.resync({**web(a), **web(a, "taken", 30081)})
        assert len(rig.delayed) == 1
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGKILL)
        rig.await_exit()
        assert reached() == "a"


def test_processes_that_die_one_after_another_are_replaced_less_and_less_often(rig: Rig) -> None:
    before = children(os.getpid())
    with answering("a") as a:
        rig.resync(web(a))
        delays = []
        for _ in range(3):
            (pid,) = children(os.getpid()) - before
            os.kill(pid, signal.SIGKILL)
            rig.await_exit()
            delays += rig.make_delayed_calls()
            assert reached() == "a"
        assert delays == [0.2, 0.4]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker process that does not answer hang sooner."""
    monkeypatch.setattr("kproxy_core.linux.relay.pool.HANG_SECONDS", 2.0)


def test_nobody_waits_for_a_process_that_hangs_and_it_is_replaced(rig: Rig, hasty: None) -> None:
    before = children(os.getpid())
    with answering("a") as a, answering("b") as b:
        rig.resync(web(a))
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGSTOP)
        of = web(b)
        rig.relays.update_succeeded(BOTH, Update(NODE.family, Scope.CHANGED, NODE, of, of))
        assert not rig.relays.await_answers(0.0)
        assert children(os.getpid()) - before == {pid}
        rig.settle()
        problem = f"relay worker {pid} does not answer"
        assert rig.shown[Family.IPV4] == f"default/web is not served on 127.0.0.1:30080: {problem}"
        assert rig.relays.problem(NODE.family, *of) == rig.shown[Family.IPV4]
        assert rig.metrics()["listeners"] == 0
        rig.await_exit()
        assert (reached(), rig.shown[Family.IPV4], rig.metrics()["listeners"]) == ("b", "", 1)


def test_a_process_that_hangs_without_orders_is_noticed(
    rig: Rig, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_core.sync.node_port_relays._CHECKED", 0.1)
    before = children(os.getpid())
    with answering("a") as a:
        rig.resync(web(a))
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGSTOP)
        rig.await_exit()
        assert children(os.getpid()) - before - {pid}
        assert reached() == "a"


def test_a_process_that_hangs_does_not_keep_the_proxy(rig: Rig, hasty: None) -> None:
    before = children(os.getpid())
    with answering("a") as a:
        rig.resync(web(a))
        (pid,) = children(os.getpid()) - before
        os.kill(pid, signal.SIGSTOP)
        of = web(a, node_port=30081)
        rig.relays.update_succeeded(BOTH, Update(NODE.family, Scope.CHANGED, NODE, of, of))
        problem = "default/web is not served on 127.0.0.1:30081: the relay worker has not answered yet"
        assert (rig.relays.problem(NODE.family, *of), rig.metrics()["listeners"]) == (problem, 0)
        rig.relays.close()
        assert children(os.getpid()) == before


def test_a_process_without_descriptors_is_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_core.sync.node_port_relays._CHECKED", 0.1)
    before = children(os.getpid())
    with answering("a") as a:
        rig.resync(web(a))
        (pid,) = children(os.getpid()) - before
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1))
        with socket.create_connection(("127.0.0.1", 30080)):
            rig.calls.get(timeout=PATIENCE)()
            assert rig.shown[Family.IPV4] == "too few descriptors, local ports or memory for relays"
            assert rig.own_metric("shortages_total") > 0


def test_relays_of_the_mode_before_are_closed_after_a_switch(rig: Rig) -> None:
    with answering("a") as a:
        rig.resync(web(a))
        rig.relays.settle(BOTH)
        rig.settle()
        assert reached() == "a"
        rig.relays.settle(Asking(Protocol.UDP))
        rig.settle()
        assert reached() == ""


def test_the_mode_that_serves_next_need_not_want_relays(rig: Rig) -> None:
    with answering("a") as a:
        rig.resync(web(a))
        rig.resync(web(a), backend=Asking(Protocol.UDP))
        assert (reached(), rig.metrics()["listeners"]) == ("", 0)
        rig.resync(web(a))
        assert reached() == "a"


def test_a_mode_that_is_tried_has_its_relays_before_it_syncs_and_closes_none(rig: Rig) -> None:
    with answering("a") as a:
        of, none = web(a), Asking()
        rig.relays.settle(none)
        rig.resync(of, backend=none)
        rig.relays.update_started(BOTH, full_update(NODE, of))
        assert reached() == "a"
        rig.relays.settle(BOTH)
        rig.resync(of)
        rig.resync(of, backend=none)
        assert reached() == "a"
        rig.relays.settle(none)
        rig.resync(of, backend=none)
        assert reached() == ""


def test_hosts_on_the_link_reach_no_relay_on_loopback() -> None:
    hosts: dict[str, Namespace] = {}

    def make(name: str, *_: object) -> Namespace:
        hosts[name] = Namespace(name)
        return hosts[name]

    with closing(Topology(make=make)):
        node, client = hosts["node"], hosts["client"]
        # A mode that has served before may have left this behind.
        node.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
        client.ip("address del 127.0.0.1/8 dev lo", f"route add 127.0.0.0/8 via {ADDRESSES['node'][0]}")
        client.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")

        def dial() -> str:
            try:
                with socket.create_connection(("127.0.0.1", 30080), 1):
                    return "connected"
            except OSError as error:
                return type(error).__name__

        def serve(pool: WorkerPool, address: str) -> None:
            pool.serve({1: Serve(1, 1, False, address, 30080, (("127.0.0.1", 9000),), 0)})

        with closing(node.inside(lambda: socket.create_server(("127.0.0.1", 9000)))):
            for address, outcome in (("0.0.0.0", "connected"), ("127.0.0.1", "ConnectionRefusedError")):
                with closing(WorkerPool(1, WorkerSettings(1.0, -1.0, 60.0))) as pool:
                    node.inside(partial(serve, pool, address))
                    assert client.inside(dial) == outcome
