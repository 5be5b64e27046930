"""API servers that are reached through an HTTP or SOCKS proxy."""

import base64
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy_core.kube.access import AccessError, CurrentAccess, load_access
from kproxy_core.kube.loader import proxy_of_environment
from kproxy_core.kube.reflector import KubernetesSource
from tests.core.api_servers import TLS, ScriptedServer, server_tls, write_kubeconfig
from tests.core.kube.observed_events import following

CA = {"certificate-authority": str(TLS / "ca.crt")}
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
ELSEWHERE = "api.invalid"
"""A name that only the proxy can resolve: no request for it can bypass the proxy."""


class TestProxy:
    """An HTTP or SOCKS 5 proxy that leads every client to one server."""

    __test__ = False

    def __init__(
        self, port: int, refusing: bool = False, socks: bool = False, tls: ssl.SSLContext | None = None,
    ) -> None:
        self._socks = socks
        self._tls = tls
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
                if self._tls is not None:
                    client = self._tls.wrap_socket(client, server_side=True)
                self._sockets.append(client)
                self._start(self._serve, client)

    def _start(self, target: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if self._socks:
                self.heads.append(_accept_socks(client))
                with socket.create_connection(("127.0.0.1", self._to)) as server:
                    self._sockets.append(server)
                    self._start(_copy, server, client)
                    _copy(client, server)
                return
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


def _accept_socks(client: socket.socket) -> str:
    """Answer RFC 1928 and 1929 as far as a connection takes; return login and destination."""
    def exactly(count: int) -> bytes:
        return client.recv(count, socket.MSG_WAITALL)

    assert 2 in exactly(exactly(2)[1]), "no user name and password are offered"
    client.sendall(b"\x05\x02")
    user = exactly(exactly(2)[1])
    password = exactly(exactly(1)[0])
    client.sendall(b"\x01\x00")
    assert exactly(4) == b"\x05\x01\x00\x03", "not a connection to a name"
    host = exactly(exactly(1)[0])
    port = int.from_bytes(exactly(2), "big")
    client.sendall(b"\x05\x00\x00\x01" + bytes(6))
    return f"{user.decode()}:{password.decode()} {host.decode()}:{port}"


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
    """The server's URL, with a name that only the proxy can resolve."""
    return f"{'https' if server.tls else 'http'}://{ELSEWHERE}:{server.port}"


def source(kubeconfig: str) -> KubernetesSource:
    return KubernetesSource(CurrentAccess(None, kubeconfig), "n")


def completes(source: KubernetesSource) -> None:
    with following(source) as observed:
        observed.wait_for(lambda o: len(o.complete) == 4)


def check_heads(proxy: TestProxy, server: ScriptedServer, *headers: str) -> None:
    assert len(proxy.heads) == 4
    for head in proxy.heads:
        first, *others = head.split("\r\n")
        asked = f"{ELSEWHERE}:{server.port}"
        assert first.startswith(f"CONNECT {asked} " if server.tls else f"GET http://{asked}/api")
        wanted = {line.lower() for line in (*headers, *([] if server.tls else [f"Host: {asked}"]))}
        assert wanted <= {line.lower() for line in others}
        assert server.tls is None or not any(line.lower().startswith("authorization") for line in others)


def test_a_proxy_in_the_kubeconfig_leads_to_the_server(
    server: ScriptedServer, proxy: TestProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    login = base64.b64encode(b"me:s@cret").decode()
    cluster = CA | {"proxy-url": f"http://me:s%40cret@127.0.0.1:{proxy.port}", "tls-server-name": "api.test"}
    completes(source(
        write_kubeconfig(tmp_path / "config", hidden(server), cluster, {"token": "t"})))
    check_heads(proxy, server, f"Proxy-Authorization: Basic {login}")
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer t"}


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_a_socks_proxy_leads_to_the_server(server: ScriptedServer, tmp_path: Path, scheme: str) -> None:
    proxy = TestProxy(server.port, socks=True)
    url = f"{scheme}://me:s%40cret@127.0.0.1:{proxy.port}"
    cluster = CA | {"proxy-url": url, "tls-server-name": "api.test"}
    try:
        completes(source(
            write_kubeconfig(tmp_path / "config", hidden(server), cluster, {"token": "t"})))
    finally:
        proxy.close()
    assert proxy.heads == [f"me:s@cret {ELSEWHERE}:{server.port}"] * 4
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer t"}


def test_a_proxy_may_be_reached_by_tls(tmp_path: Path) -> None:
    server = ScriptedServer({}, tls=server_tls())
    proxy = TestProxy(server.port, tls=server_tls())
    cluster = CA | {"proxy-url": f"https://127.0.0.1:{proxy.port}", "tls-server-name": "api.test"}
    try:
        completes(source(write_kubeconfig(tmp_path / "config", hidden(server), cluster)))
    finally:
        proxy.close()
        server.close()
    check_heads(proxy, server)


def test_a_proxy_in_the_environment_leads_to_the_server(
    server: ScriptedServer, proxy: TestProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy" if server.tls else "http_proxy", f"127.0.0.1:{proxy.port}")
    cluster = CA | {"tls-server-name": "api.test"}
    completes(source(write_kubeconfig(tmp_path / "config", hidden(server), cluster)))
    check_heads(proxy, server)


def test_a_loopback_address_is_reached_without_a_proxy(
    server: ScriptedServer, proxy: TestProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    completes(source(write_kubeconfig(tmp_path / "config", server.url, CA)))
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
        with following(source(config)):
            assert said.wait(120)
    finally:
        proxy.close()
    problem = caplog.records[0].fields["problem"]  # type: ignore[attr-defined]
    assert problem == (f"can't connect to {ELSEWHERE}:443 through the proxy 127.0.0.1:{proxy.port}: "
                       "Tunnel connection failed: 407 Proxy Authentication Required")


@pytest.mark.parametrize(("exceptions", "host", "excepted"), [
    ("", "api.corp", False),
    ("*", "api.corp", True),
    ("corp", "api.corp", True),
    ("corp", "corp", True),
    ("corp", "apicorp", False),
    (".corp", "api.corp", True),
    ("*.corp", "api.corp", True),
    ("other, API.Corp ,x", "api.CORP", True),
    ("api.corp:6443", "api.corp", True),
    ("api.corp:443", "api.corp", False),
    ("api.corp:x,[", "api.corp", False),
    ("10.0.0.0/8", "10.1.2.3", True),
    ("10.0.0.0/8", "11.1.2.3", False),
    ("10.1.2.3", "10.1.2.3", True),
    ("10.1.2.3:6443", "10.1.2.3", True),
    ("fd00::/8", "fd00::1", True),
    ("[fd00::1]:6443", "fd00::1", True),
    ("", "localhost", True),
    ("", "127.8.8.8", True),
    ("", "::1", True),
])
def test_exceptions_are_reached_directly(
    exceptions: str, host: str, excepted: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", exceptions)
    server = f"https://{f'[{host}]' if ':' in host else host}:6443"
    assert proxy_of_environment(server) == ("" if excepted else "http://proxy:3128")


def test_http_and_https_have_proxies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "one")
    monkeypatch.setenv("HTTPS_PROXY", "http://[fd00::2]:1")
    assert load_access("http://api:80", None).proxy == "http://one"
    assert load_access("https://api:443", None).proxy == "http://[fd00::2]:1"


@pytest.mark.parametrize("url", ["socks4://p", "ftp://p", "http://", "http://p:x", "http://a b", "http://[::1"])
def test_an_unusable_proxy_is_refused_without_its_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(AccessError, match=r"^--master: the proxy's URL needs a host") as refused:
        load_access("https://api.corp", None)
    assert url not in str(refused.value)
