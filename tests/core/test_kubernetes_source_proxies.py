"""API servers that are reached through an HTTP proxy."""

import base64
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy_core.apiclient.access import AccessError, load_access
from kproxy_core.apiclient.proxies import NotAProxy, Proxy, parse_proxy, proxy_of_environment
from kproxy_core.sources.apiserver.source import KubernetesSource
from tests.core.api_servers import TLS, ScriptedServer, server_tls, write_kubeconfig
from tests.core.observed_events import following

CA = {"certificate-authority": str(TLS / "ca.crt")}
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
ELSEWHERE = "api.invalid"
"""A name that only the proxy knows: as the server's, it shows that nobody went around the proxy."""


class TestProxy:
    """An HTTP proxy that leads everybody to one server."""

    __test__ = False

    def __init__(self, port: int, refusing: bool = False) -> None:
        self.heads: list[str] = []
        """The first request of each connection, without its end."""
        self._to = port
        self._refusing = refusing
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for made in (self._listener, *self._sockets):
            with suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._sockets.append(client)
                self._start(self._serve, client)

    def _start(self, target: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                data = client.recv(65536)
                if not data:
                    return
                head += data
            self.heads.append(head.decode().strip())
            if self._refusing:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self._to)) as server:
                self._sockets.append(server)
                if head.startswith(b"CONNECT "):
                    client.sendall(b"HTTP/1.1 200 Connection established\r\nX: y\r\n\r\n")
                else:
                    server.sendall(head)
                self._start(_copy, server, client)
                _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(params=[True, False], ids=["https", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    server = ScriptedServer({}, tls=server_tls() if request.param else None)
    yield server
    server.close()


@pytest.fixture
def proxy(server: ScriptedServer) -> Iterator[TestProxy]:
    proxy = TestProxy(server.port)
    yield proxy
    proxy.close()


def hidden(server: ScriptedServer) -> str:
    """The server's URL, by a name that only the proxy knows."""
    return f"{'https' if server.tls else 'http'}://{ELSEWHERE}:{server.port}"


def completes(source: KubernetesSource) -> None:
    with following(source) as observed:
        observed.wait_for(lambda o: len(o.complete) == 4)


def check_heads(proxy: TestProxy, server: ScriptedServer, *headers: str) -> None:
    assert len(proxy.heads) == 4
    for head in proxy.heads:
        first, *others = head.split("\r\n")
        asked = f"{ELSEWHERE}:{server.port}"
        assert first.startswith(f"CONNECT {asked} " if server.tls else f"GET http://{asked}/api")
        assert {f"Host: {asked}", *headers} <= set(others)
        assert server.tls is None or not any(line.startswith("Authorization") for line in others)


def test_a_proxy_in_the_kubeconfig_leads_to_the_server(
    server: ScriptedServer, proxy: TestProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    login = base64.b64encode(b"me:s@cret").decode()
    cluster = CA | {"proxy-url": f"http://me:s%40cret@127.0.0.1:{proxy.port}", "tls-server-name": "api.test"}
    completes(KubernetesSource(
        None, write_kubeconfig(tmp_path / "config", hidden(server), cluster, {"token": "t"}), "n"))
    check_heads(proxy, server, f"Proxy-Authorization: Basic {login}")
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer t"}


def test_a_proxy_in_the_environment_leads_to_the_server(
    server: ScriptedServer, proxy: TestProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy" if server.tls else "http_proxy", f"127.0.0.1:{proxy.port}")
    cluster = CA | {"tls-server-name": "api.test"}
    completes(KubernetesSource(None, write_kubeconfig(tmp_path / "config", hidden(server), cluster), "n"))
    check_heads(proxy, server)


def test_this_machine_is_asked_directly(
    server: ScriptedServer, proxy: TestProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    completes(KubernetesSource(None, write_kubeconfig(tmp_path / "config", server.url, CA), "n"))
    assert not proxy.heads


def test_a_proxy_that_refuses_is_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    proxy = TestProxy(1, refusing=True)
    said = threading.Event()

    def note(_: logging.LogRecord) -> bool:
        said.set()
        return True

    caplog.handler.addFilter(note)
    cluster = CA | {"proxy-url": f"http://me:hidden@127.0.0.1:{proxy.port}"}
    config = write_kubeconfig(tmp_path / "config", f"https://{ELSEWHERE}", cluster)
    try:
        with following(KubernetesSource(None, config, "n")):
            assert said.wait(30)
    finally:
        proxy.close()
    problem = caplog.records[0].fields["problem"]  # type: ignore[attr-defined]
    assert problem == (f"can't connect to {ELSEWHERE}:443 through the proxy 127.0.0.1:{proxy.port}: "
                       "the proxy answers with status 407")


@pytest.mark.parametrize(("exceptions", "host", "excepted"), [
    ("", "api.corp", False),
    ("*", "api.corp", True),
    ("corp", "api.corp", True),
    ("corp", "corp", True),
    ("corp", "apicorp", False),
    (".corp", "api.corp", True),
    (".corp", "corp", False),
    ("*.corp", "api.corp", True),
    ("other, API.Corp ,x", "api.CORP", True),
    ("api.corp:6443", "api.corp", True),
    ("api.corp:443", "api.corp", False),
    ("api.corp:x,[", "api.corp", False),
    ("10.0.0.0/8", "10.1.2.3", True),
    ("10.0.0.0/8", "11.1.2.3", False),
    ("10.1.2.3", "10.1.2.3", True),
    ("10.1.2.3:6443", "10.1.2.3", True),
    ("2.3", "10.1.2.3", False),
    ("fd00::/8", "fd00::1", True),
    ("[fd00::1]:6443", "fd00::1", True),
    ("", "localhost", True),
    ("", "127.8.8.8", True),
    ("", "::1", True),
])
def test_who_is_asked_directly(exceptions: str, host: str, excepted: bool) -> None:
    environment = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": exceptions}
    found = proxy_of_environment(environment, True, host, 6443)
    assert found == (None if excepted else Proxy("proxy", 3128))


def test_http_and_https_have_proxies_of_their_own() -> None:
    environment = {"http_proxy": "one", "HTTPS_PROXY": "http://[fd00::2]:1", "https_proxy": "lost"}
    assert proxy_of_environment(environment, False, "api", 80) == Proxy("one", 80)
    assert proxy_of_environment(environment, True, "api", 443) == Proxy("fd00::2", 1)


@pytest.mark.parametrize("url", ["socks5://p", "https://p", "http://", "http://p:x", "http://a b", "http://[::1"])
def test_what_is_no_proxy_is_refused_without_repeating_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotAProxy):
        parse_proxy(url)
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(AccessError, match=r"^the environment's HTTPS_PROXY: ") as refused:
        load_access("https://api.corp", None)
    assert url not in str(refused.value)
