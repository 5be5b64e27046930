"""Reaching an API server by URL, kubeconfig and service account, with TLS and tokens."""

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

from kproxy_core.kube.access import AccessError, CurrentAccess, Load, NotLoaded, load_access
from kproxy_core.kube.reflector import KubernetesSource
from kproxy_core.kube.requests import ApiRequest
from tests.core.api_servers import CHECKOUT, TLS, Json, ScriptedServer, server_tls, write_kubeconfig
from tests.core.kube.observed_events import following
from tests.patience import PATIENCE

Kubeconfig = Callable[..., str]
CA, CERT, KEY = (str(TLS / name) for name in ("ca.crt", "client.crt", "client.key"))


def inline(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """An API server without objects that asks for a client certificate and takes connections without one."""
    server = ScriptedServer({}, tls=server_tls(ssl.CERT_OPTIONAL))
    yield server
    server.close()


@pytest.fixture
def picky_server() -> Iterator[ScriptedServer]:
    """An API server that talks only to who has a certificate."""
    server = ScriptedServer({}, tls=server_tls(ssl.CERT_REQUIRED))
    yield server
    server.close()


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Kubeconfig:
    """Writes a kubeconfig; gives its path."""
    def write(server: str, cluster: Json | None = None, user: Json | None = None) -> str:
        return write_kubeconfig(tmp_path / "kubeconfig", server, cluster, user)
    return write


def completes(source: KubernetesSource) -> bool:
    """Return whether *source* receives everything from its server."""
    with following(source) as observed:
        observed.wait_for(lambda o: len(o.complete) == 4)
        return not observed.bad


def tokens(server: ScriptedServer) -> set[str | None]:
    return {request.headers.get("authorization") for request in server.requests}


def jwt(expires: int) -> str:
    """Return an OpenID Connect token that says no more than when it *expires* (epoch seconds)."""
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, {"exp": expires}))
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "x"])


LASTING = jwt(4_000_000_000)


# -- a URL

@pytest.mark.parametrize(("url", "authority", "base_path", "secure"), [
    ("http://10.0.0.1:8080", "10.0.0.1:8080", "", False),
    ("10.0.0.1:8080/", "10.0.0.1:8080", "", False),
    ("https://api.example", "api.example:443", "", True),
    ("https://[fd00::1]:6443/k8s/clusters/c-1/", "[fd00::1]:6443", "/k8s/clusters/c-1", True),
    ("localhost", "localhost:80", "", False),
])
def test_master_is_a_url(url: str, authority: str, base_path: str, secure: bool) -> None:
    found = load_access(url, None)
    scheme = "https" if secure else "http"
    assert (found.server, found.tls is not None) == (f"{scheme}://{authority}{base_path}", secure)
    assert found.authority == authority


@pytest.mark.parametrize("url", [
    "ftp://api", "https://", "http://host:port", "http://h:99999", "http://user:secret@h", "http://h/?x=y",
    "http://[::1", "http://h\r\nX: y", "http://h/a b",
])
def test_a_url_that_names_no_server_is_refused_with_the_option(url: str) -> None:
    with pytest.raises(AccessError, match=r"^--master: "):
        load_access(url, None)


def test_the_running_proxy_never_imports_the_kubernetes_package(kubeconfig: Kubeconfig) -> None:
    program = ("import sys; from kproxy_core.kube.access import CurrentAccess; "
               "from kproxy_core.kube.reflector import KubernetesSource; "
               "KubernetesSource(CurrentAccess(None, sys.argv[1]), 'n'); "
               "print(*({'kubernetes', 'requests', 'oauthlib', 'yaml', 'socks'} & set(sys.modules)))")
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}",
               kubeconfig("https://127.0.0.1:1")]
    run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize(("user", "imported"), [
    ({"tokenFile": "token"}, []),
    ({"auth-provider": {"name": "gcp", "config": {"access-token": "t"}}},
     ["oauthlib.oauth2.rfc6749", "urllib3.util"]),
], ids=["plain", "auth-provider"])
def test_only_an_auth_provider_makes_the_loader_import_all(
    kubeconfig: Kubeconfig, tmp_path: Path, user: Json, imported: list[str],
) -> None:
    (tmp_path / "token").write_text("t")
    program = ("from kproxy_core.kube import loader; loader.main(sys.argv[1:]); "
               "heavy = {'oauthlib.oauth2.rfc6749', 'urllib3.util'}; "
               "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)")
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}",
               "", kubeconfig("https://127.0.0.1:1", {}, user), ""]
    run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["headers"] == [["Authorization", "Bearer t"]]
    assert run.stderr.split() == imported


# -- a kubeconfig

@pytest.mark.parametrize("cluster", [
    {"certificate-authority": CA}, {"certificate-authority-data": inline(CA)},
    {"insecure-skip-tls-verify": True},
], ids=["file", "inline", "unverified"])
@pytest.mark.parametrize("user", [
    {"client-certificate": CERT, "client-key": KEY},
    {"client-certificate-data": inline(CERT), "client-key-data": inline(KEY)},
], ids=["files", "inline"])
def test_a_client_certificate_authenticates(
    picky_server: ScriptedServer, kubeconfig: Kubeconfig, cluster: Json, user: Json,
) -> None:
    assert completes(KubernetesSource(CurrentAccess(None, kubeconfig(picky_server.url, cluster, user)), "n"))


def test_inline_keys_leave_no_files_behind(
    picky_server: ScriptedServer, kubeconfig: Kubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    load_access(None, kubeconfig(picky_server.url, {"certificate-authority-data": inline(CA)},
                                 {"client-certificate-data": inline(CERT), "client-key-data": inline(KEY)}))
    assert [path.name for path in tmp_path.iterdir()] == ["kubeconfig"]


@pytest.mark.parametrize(("user", "header"), [
    ({"token": "secret"}, "Bearer secret"),
    ({"username": "me", "password": "pw"}, "Basic " + base64.b64encode(b"me:pw").decode()),
    ({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "echo", "interactiveMode": "Never",
               "args": ['{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1",'
                        ' "status": {"token": "from-exec"}}']}}, "Bearer from-exec"),
    ({"auth-provider": {"name": "gcp", "config": {"access-token": "from-gcp"}}}, "Bearer from-gcp"),
    ({"auth-provider": {"name": "oidc", "config": {"id-token": LASTING}}}, f"Bearer {LASTING}"),
    ({}, None),
], ids=["token", "password", "exec", "gcp", "oidc", "nobody"])
def test_credentials_are_sent(
    server: ScriptedServer, kubeconfig: Kubeconfig, user: Json, header: str | None,
) -> None:
    config = kubeconfig(server.url, {"certificate-authority": CA}, user)
    assert completes(KubernetesSource(CurrentAccess(None, config), "n"))
    assert tokens(server) == {header}


class Issuer(BaseHTTPRequestHandler):
    """Issues OpenID Connect tokens: says where, and renews any."""

    def do_GET(self) -> None:
        self._answer({"token_endpoint": f"http://{self.headers['Host']}/token"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"access_token": "a", "token_type": "bearer", "id_token": LASTING, "refresh_token": "r"})

    def _answer(self, content: Json) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_expired_token_is_renewed_by_its_issuer(
    kubeconfig: Kubeconfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OAUTHLIB_INSECURE_TRANSPORT", "1")
    with HTTPServer(("127.0.0.1", 0), Issuer) as issuer:
        Thread(target=issuer.serve_forever, daemon=True).start()
        config = {"id-token": jwt(1), "refresh-token": "r", "client-id": "c", "client-secret": "s",
                  "idp-issuer-url": f"http://127.0.0.1:{issuer.server_port}"}
        path = kubeconfig("https://127.0.0.1:1", {}, {"auth-provider": {"name": "oidc", "config": config}})
        try:
            assert load_access(None, path).headers == [("Authorization", f"Bearer {LASTING}")]
        finally:
            issuer.shutdown()
    assert LASTING in Path(path).read_text(), "the next start needs it"


def test_another_user_is_impersonated(server: ScriptedServer, kubeconfig: Kubeconfig) -> None:
    user = {"token": "t", "as": "system:node:n", "as-uid": "7", "as-groups": ["system:nodes", "more"],
            "as-user-extra": {"Example.com/Scope": ["one"]}}
    config = kubeconfig(server.url, {"certificate-authority": CA}, user)
    assert ("Impersonate-Group", "system:nodes") in load_access(None, config).headers
    assert completes(KubernetesSource(CurrentAccess(None, config), "n"))
    for request in server.requests:
        shown = {name: value for name, value in request.headers.items() if name.startswith("impersonate-")}
        # Of headers that occur twice, the test's server keeps the last.
        assert shown == {"impersonate-user": "system:node:n", "impersonate-uid": "7",
                         "impersonate-group": "more", "impersonate-extra-example.com%2fscope": "one"}


def test_a_plugin_that_hangs_is_ended(kubeconfig: Kubeconfig) -> None:
    config = kubeconfig("https://127.0.0.1:1", {}, {"exec": {
        "command": "sleep", "args": ["1000"], "apiVersion": "client.authentication.k8s.io/v1"}})
    with pytest.raises(NotLoaded, match="not loaded within 1 s; does a credential plugin hang"):
        Load("", config).result(timeout=1)


def test_a_plugin_that_prints_without_end_fills_no_memory(kubeconfig: Kubeconfig) -> None:
    config = kubeconfig("https://127.0.0.1:1", {}, {"exec": {
        "command": "yes", "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}})
    with pytest.raises(AccessError, match="perhaps because it printed more than 512 MiB"):
        load_access(None, config)


def test_a_plugin_that_hangs_ends_soon_after_a_killed_proxy(
    kubeconfig: Kubeconfig, tmp_path: Path
) -> None:
    there = tmp_path / "plugin-runs"
    os.mkfifo(there)
    config = kubeconfig("https://127.0.0.1:1", {}, {"exec": {
        "command": "sh", "args": ["-c", f"exec >{there}; sleep 1000"], "interactiveMode": "Never",
        "apiVersion": "client.authentication.k8s.io/v1"}})
    load = ("from kproxy_core.kube import loader\n"
            f"loader.LOAD_SECONDS = -5; loader.main(['', {config!r}, ''])")
    child = subprocess.Popen([sys.executable, "-c", load], start_new_session=True)
    with there.open("rb") as held:
        assert held.read() == b"", "nobody writes any more"
    assert child.wait(PATIENCE) == 128 + signal.SIGALRM


def test_the_name_in_the_certificate_may_differ_from_the_host(
    server: ScriptedServer, kubeconfig: Kubeconfig,
) -> None:
    assert completes(KubernetesSource(CurrentAccess(None, kubeconfig(
        server.url, {"certificate-authority": CA, "tls-server-name": "api.test"})), "n"))


def test_master_overrides_the_server_of_the_kubeconfig(
    server: ScriptedServer, kubeconfig: Kubeconfig,
) -> None:
    config = kubeconfig("https://192.0.2.1:6443", {"certificate-authority": CA}, {"token": "t"})
    assert completes(KubernetesSource(CurrentAccess(server.url, config), "n"))
    assert tokens(server) == {"Bearer t"}


def test_an_untrusted_server_gets_no_request(
    server: ScriptedServer, kubeconfig: Kubeconfig, caplog: pytest.LogCaptureFixture,
) -> None:
    attempts: Queue[ApiRequest] = Queue()
    config = kubeconfig(server.url, {}, {"token": "secret"})
    source = KubernetesSource(CurrentAccess(None, config), "n", observe=attempts.put)
    with following(source) as observed:
        for _ in range(8):
            assert attempts.get(timeout=PATIENCE).code == "<error>"
    assert not observed.events
    assert not server.requests
    said, = caplog.records
    assert "certificate verify failed" in said.fields["problem"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [
    "", "- 1\n- 2", "{", "current-context: nowhere", '{"current-context": "x", "contexts": 7}', "\x00",
])
def test_a_broken_kubeconfig_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken"
    path.write_text(content)
    with pytest.raises(AccessError, match=rf"^--kubeconfig: {path}: [^\n]+$"):
        load_access(None, str(path))


@pytest.mark.parametrize(("cluster", "user", "problem"), [
    ({"certificate-authority": "/nowhere/ca.crt"}, {}, "/nowhere/ca.crt"),
    ({"certificate-authority": KEY}, {}, "certificates"),
    ({}, {"client-certificate": CA, "client-key": KEY}, "certificates"),
    ({"proxy-url": "socks4://me:hidden@proxy:1080"}, {}, "the proxy's URL needs a host and one of"),
    ({"proxy-url": "http://"}, {}, "the proxy's URL needs a host and one of"),
    ({"certificate-authority-data": "%"}, {}, "certificates"),
    ({}, {"client-certificate-data": "eA==", "client-key-data": "eA=="}, "certificates"),
    ({}, {"tokenFile": "/nowhere/token"}, "there is no file '/nowhere/token'"),
    ({}, {"auth-provider": {"name": "azure"}}, "auth-provider 'azure': it returned no token"),
    ({}, {"as-groups": ["admins"]}, "need as"),
    ({}, {"as": "two\nlines"}, "as: contains characters that a header cannot have"),
    ({}, {"exec": {"command": "false", "apiVersion": "x"}}, "exec: process returned 1"),
    ({}, {"exec": {"command": "/nowhere/plugin", "apiVersion": "x"}}, "exec: .*'/nowhere/plugin'"),
    ({}, {"exec": {"command": "echo", "apiVersion": "x",
                   "args": ['{"apiVersion": "x", "kind": "", "status": {}}']}},
     "missing token or clientCertificateData"),
    ({}, {"token": "two\nlines"}, "token"),
    ({"server": "ftp://x"}, {}, "not an http or https URL"),
])
def test_unusable_settings_are_refused_with_the_reason(
    kubeconfig: Kubeconfig, cluster: Json, user: Json, problem: str,
) -> None:
    with pytest.raises(AccessError, match=problem):
        load_access(None, kubeconfig("https://127.0.0.1:1", cluster, user))


def test_a_missing_kubeconfig_is_named() -> None:
    with pytest.raises(AccessError, match="there is no file '/nowhere/config'"):
        load_access(None, "/nowhere/config")


# -- a pod

def test_a_pod_uses_its_service_account_and_each_new_token(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    (tmp_path / "ca.crt").write_text(Path(CA).read_text())
    for token in ("first", "second"):
        (tmp_path / "token").write_text(token + "\n")
        server.requests.clear()
        access = CurrentAccess(None, None, service_account=str(tmp_path))
        assert completes(KubernetesSource(access, "n"))
        assert tokens(server) == {f"bearer {token}"}


def test_outside_of_a_pod_an_option_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(AccessError, match="neither --master nor --kubeconfig"):
        KubernetesSource(CurrentAccess(None, None), "n")
