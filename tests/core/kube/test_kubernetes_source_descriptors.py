"""The descriptors of a source that fails again and again, without a garbage collector to close them."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kproxy_conformance.open_files import open_files
from kproxy_core.kube.access import CurrentAccess
from kproxy_core.kube.reflector import KubernetesSource
from kproxy_core.kube.requests import ApiRequest
from tests.core.api_servers import (
    KINDS,
    TLS,
    Exchange,
    ScriptedServer,
    Step,
    event,
    refuse,
    replace_file,
    server_tls,
    service,
    watched,
    write_kubeconfig,
)
from tests.core.kube.observed_events import always, following
from tests.core.kube.test_kubernetes_source_proxies import TestProxy

REQUESTS = 60
"""Requests that fail before the descriptors are counted."""

CA = {"certificate-authority": str(TLS / "ca.crt")}


@pytest.fixture(autouse=True)
def _no_help() -> Iterator[None]:
    """No garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sockets() -> int:
    return sum(name.startswith("socket:") for name in open_files(os.getpid()).values())


def follow_through_failures(config: str, then: Callable[[int], None] = lambda _: None) -> None:
    """Follow the server of *config* for `REQUESTS`. *then* is called after each with its number."""
    made: list[ApiRequest] = []
    enough = threading.Event()

    def note(request: ApiRequest) -> None:
        made.append(request)
        then(len(made))
        if len(made) >= REQUESTS:
            enough.set()

    source = KubernetesSource(CurrentAccess(None, config), "n", qps=0, observe=note, backoff=always(0.0))
    with following(source):
        assert enough.wait(120)


def cut(exchange: Exchange) -> None:
    """Begin an answer, and close the connection."""
    exchange.send(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 100\r\n\r\n{")
    exchange.leave()


@pytest.mark.parametrize("step", [
    refuse(401), refuse(401, "Connection: close"), refuse(503), cut,
    watched({"type": "ERROR", "object": {"code": 401, "reason": "Unauthorized"}}),
    watched(event("ADDED", service("a"), 2), hold=False),
], ids=["401", "401 and close", "503", "cut answer", "401 in a watch", "cut watch"])
@pytest.mark.parametrize("secure", [True, False], ids=["https", "http"])
def test_requests_that_fail_leave_no_socket_open(tmp_path: Path, secure: bool, step: Step) -> None:
    before = sockets()
    server = ScriptedServer({plural: [step] * REQUESTS for plural in KINDS},
                            tls=server_tls() if secure else None)
    try:
        (tmp_path / "token").write_text("rejected")
        follow_through_failures(write_kubeconfig(
            tmp_path / "config", server.url, CA if secure else {}, {"tokenFile": "token"}))
    finally:
        server.close()
    assert sockets() == before


def test_rejected_tokens_that_are_replaced_leave_no_socket_open(tmp_path: Path) -> None:
    before = sockets()
    server = ScriptedServer({plural: [refuse(401)] * REQUESTS for plural in KINDS}, tls=server_tls())
    token = tmp_path / "token"
    token.write_text("rejected")

    def replace(number: int) -> None:
        if number % 20 == 0:
            replace_file(token, f"rejected {number}")

    try:
        follow_through_failures(
            write_kubeconfig(tmp_path / "config", server.url, CA, {"tokenFile": "token"}), replace)
    finally:
        server.close()
    assert sockets() == before


@pytest.mark.parametrize("proxy_tls", [False, True], ids=["http proxy", "https proxy"])
@pytest.mark.parametrize("refusing", [True, False], ids=["proxy refuses", "untrusted server"])
def test_connections_that_fail_leave_no_socket_open(tmp_path: Path, proxy_tls: bool, refusing: bool) -> None:
    before = sockets()
    with ExitStack() as stack:
        server = ScriptedServer({}, tls=server_tls())
        stack.callback(server.close)
        proxy = TestProxy(server.port, refusing=refusing, tls=server_tls() if proxy_tls else None)
        stack.callback(proxy.close)
        scheme = "https" if proxy_tls else "http"
        follow_through_failures(write_kubeconfig(
            tmp_path / "config", "https://api.invalid",
            CA | {"proxy-url": f"{scheme}://127.0.0.1:{proxy.port}"}))
    assert sockets() == before
