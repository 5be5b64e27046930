"""Requests are compressed, batched, counted and limited, and a dead peer is noticed."""

import fcntl
import gzip
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from termios import TIOCOUTQ

import pytest

from kproxy_core.kube.access import CurrentAccess
from kproxy_core.kube.reflector import KubernetesSource
from kproxy_core.kube.requests import ApiRequest
from kproxy_core.kube.transport import Limits
from kproxy_core.model.events import Event
from tests.core.api_servers import (
    TLS,
    Exchange,
    ScriptedServer,
    event,
    initial_events_end,
    listed,
    refuse,
    server_tls,
    service,
    watched,
    write_kubeconfig,
)
from tests.core.kube.observed_events import Observed, following
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE

CA = {"certificate-authority": str(TLS / "ca.crt")}
OLD_SERVER = refuse(422)


# -- compression

def zipped(exchange: Exchange) -> None:
    """A list, compressed if that was offered, as the API server does with what is large."""
    body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [service("a")]}).encode()
    if exchange.request.headers.get("accept-encoding") == "gzip":
        exchange.answer(200, gzip.compress(body), "Content-Encoding: gzip")
    else:
        exchange.answer(200, body)


@pytest.mark.parametrize("disabled", [False, True], ids=["compressed", "disable-compression"])
def test_lists_may_be_compressed_and_watches_may_not(tmp_path: Path, disabled: bool) -> None:
    server = ScriptedServer({"services": [OLD_SERVER, zipped, watched(event("ADDED", service("b"), 2))]})
    config = write_kubeconfig(tmp_path / "config", server.url, {"disable-compression": disabled})
    try:
        with following(KubernetesSource(CurrentAccess(None, config), "n")) as observed:
            observed.wait_for(lambda o: o.names == {"a", "b"})
    finally:
        server.close()
    offered = [request.headers.get("accept-encoding") for request in server.requests
               if request.resource == "services"]
    assert offered == [None, None if disabled else "gzip", None]


# -- TLS

def test_events_that_arrive_together_are_one_batch_over_tls(tmp_path: Path) -> None:
    batches: Queue[list[Event]] = Queue()
    arrived = threading.Event()

    def emit(events: list[Event]) -> None:
        batches.put(events)
        assert arrived.wait(PATIENCE)  # the next are taken when they all are there

    def many_records(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.chunk(exchange.event(initial_events_end(1)))
        for number in range(41):
            exchange.chunk(exchange.event(event("ADDED", service(f"s{number}"), 1)))
        while struct.unpack("i", fcntl.ioctl(exchange.socket, TIOCOUTQ, bytes(4)))[0]:
            pass  # not yet with the client
        arrived.set()
        exchange.until_closed()

    server = ScriptedServer({"services": [many_records], "endpointslices": [watched()],
                             "nodes": [watched()], "servicecidrs": [watched()]}, tls=server_tls())
    source = KubernetesSource(CurrentAccess(None, write_kubeconfig(tmp_path / "config", server.url, CA)), "n")
    source.start(emit)
    try:
        sizes = [len(batches.get(timeout=PATIENCE))]
        while sum(sizes) < 42:
            sizes.append(len(batches.get(timeout=PATIENCE)))
    finally:
        source.stop()
        server.close()
    # The number that arrived with the first is up to chance; the rest arrived at once.
    assert len(sizes) <= 2


# -- counting

def test_each_request_is_observed() -> None:
    told: list[ApiRequest] = []
    steps = [OLD_SERVER, lambda e: e.send(b"SSH-2.0-OpenSSH\r\n\r\n"), listed(service("a"), version=1),
             watched(event("ADDED", service("b"), 2))]
    server = ScriptedServer({"services": steps})
    try:
        source = KubernetesSource(CurrentAccess(server.url, None), "n", observe=told.append)
        with following(source) as observed:
            observed.wait_for(lambda o: len(o.complete) == 4 and o.names == {"a", "b"})
    finally:
        server.close()
    assert {request.host for request in told} == {f"127.0.0.1:{server.port}"}
    assert sorted(request.code for request in told) == ["200"] * 5 + ["422", "<error>"]
    assert [request.received for request in told if request.received is not None] == [
        len(json.dumps({"metadata": {"resourceVersion": "1"}, "items": [service("a")]}))]
    assert all(request.seconds > 0 for request in told)


# -- limits

def test_only_the_first_page_of_a_list_waits_for_the_rate_limit() -> None:
    told: list[ApiRequest] = []
    pages = [listed(service(f"s{number}"), version=1, rest="more") for number in range(30)]
    server = ScriptedServer({"services": [OLD_SERVER, *pages, listed(service("last"), version=1)]})
    # Eight requests at once, and then one in a long time.
    source = KubernetesSource(CurrentAccess(server.url, None), "n", qps=0.001, burst=8, observe=told.append)
    try:
        with following(source) as observed:
            observed.wait_for(lambda o: len(o.complete) == 4)
            assert len(observed.names) == 31
    finally:
        server.close()
    assert not any(request.waited for request in told)


def test_a_source_that_waits_for_the_rate_limit_stops_at_once() -> None:
    server = ScriptedServer({})
    source = KubernetesSource(CurrentAccess(server.url, None), "n", qps=0.001, burst=1)
    try:
        with following(source) as observed:
            observed.wait_for(lambda o: len(o.complete) == 1)
    finally:
        server.close()


# -- dead peers

def test_a_peer_that_vanished_is_noticed_in_less_than_a_minute() -> None:
    timeout = Limits().peer_timeout
    assert timeout < 60
    assert (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout * 1000) in Limits().socket_options


@pytest.fixture
def two_nodes() -> Iterator[tuple[Namespace, Namespace]]:
    """Ours, 10.0.0.1, with a cable to the API server's, 10.0.0.2."""
    with namespace() as ours, namespace() as theirs:
        ours.ip(f"link add cable type veth peer name cable netns {theirs.name}",
                "address add 10.0.0.1/24 dev cable", "link set cable up")
        theirs.ip("address add 10.0.0.2/24 dev cable", "link set cable up")
        yield ours, theirs


def test_a_peer_that_vanished_is_replaced_by_one_that_answers(two_nodes: tuple[Namespace, Namespace]) -> None:
    # The kernel's part takes seconds here instead of most of a minute.
    limits = Limits(keepalive=(1, 1, 2))
    ours, theirs = two_nodes
    steps = [watched(event("ADDED", service("a"), 1), initial_events_end(1)),
             watched(event("ADDED", service("b"), 2))]
    server = theirs.inside(lambda: ScriptedServer({"services": steps}, address="10.0.0.2"))
    source = KubernetesSource(CurrentAccess(f"http://10.0.0.2:{server.port}", None), "n", limits=limits)
    observed = Observed()
    try:
        ours.inside(lambda: source.start(observed))
        observed.wait_for(lambda o: len(o.complete) == 4)
        # From one moment to the next, the server hears nothing more on these connections.
        ports = ", ".join(map(str, server.client_ports()))
        theirs.nft("table ip cut { chain cut { type filter hook prerouting priority -300; "
                   f"tcp sport {{ {ports} }} drop; }}; }}")
        observed.wait_for(lambda o: "b" in o.names)
    finally:
        source.stop()
        server.close()
    assert observed.names == {"a", "b"}
    assert [query.get("resourceVersion") for query in server.asked("services")] == [None, "1"]
