"""Credentials that are replaced while the proxy runs: it uses the new ones."""

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kproxy_core.kube.access import AccessError, CurrentAccess
from kproxy_core.kube.reflector import KubernetesSource
from kproxy_core.kube.requests import ApiRequest, ApiRequests
from kproxy_core.kube.transport import JSON
from kproxy_core.model.timing import TokenBucket
from tests.core.api_servers import (
    TLS,
    Exchange,
    Json,
    ScriptedServer,
    Step,
    event,
    initial_events_end,
    refuse,
    replace_file,
    server_tls,
    service,
    watched,
    write_kubeconfig,
)
from tests.core.kube.observed_events import always, following

CA = {"certificate-authority": str(TLS / "ca.crt")}


def make_certificate(directory: Path, name: str) -> None:
    """A client certificate for *name*, signed by itself, as ``name.crt`` and ``name.key``."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"],
        cwd=directory, check=True, capture_output=True)


def shown_name(exchange: Exchange) -> str:
    """The name in the certificate that the client showed."""
    assert isinstance(exchange.socket, ssl.SSLSocket)
    certificate = exchange.socket.getpeercert() or {}
    return dict(pair for parts in certificate["subject"] for pair in parts)["commonName"]  # type: ignore[misc]


def watched_until(what: Callable[[], object]) -> Step:
    """A watch of nothing that ends after *what* was done."""
    def step(exchange: Exchange) -> None:
        exchange.begin_watch()
        exchange.chunk(exchange.event(initial_events_end(1)))
        what()
        exchange.end_watch()
    return step


@contextmanager
def serving(*steps: Step, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer({"services": steps}, tls=tls or server_tls())
    try:
        yield server
    finally:
        server.close()


def follow_until_a_service(config: str) -> None:
    with following(KubernetesSource(CurrentAccess(None, config), "n")) as observed:
        observed.wait_for(lambda o: o.names == {"a"})


def tokens(server: ScriptedServer) -> list[str]:
    return [request.headers["authorization"] for request in server.requests if request.resource == "services"]


ADDED = watched(event("ADDED", service("a"), 2))


def test_a_token_file_is_read_for_each_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    with serving(watched_until(lambda: replace_file(token, "new\n")), ADDED) as server:
        follow_until_a_service(write_kubeconfig(tmp_path / "config", server.url, CA, {"tokenFile": "token"}))
    assert tokens(server) == ["Bearer old", "Bearer new"]
    assert not caplog.records


def test_a_token_file_that_is_empty_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    config = write_kubeconfig(tmp_path / "config", "https://127.0.0.1:1", CA, {"tokenFile": "token"})
    access = CurrentAccess(None, config)
    assert access.now.headers == [("Authorization", "Bearer old")]
    token.write_text("")
    with pytest.raises(AccessError, match="token contains no token"):
        access.keep_up()
    assert access.now.headers == [("Authorization", "Bearer old")]
    token.write_text("new")
    access.keep_up()
    assert access.now.headers == [("Authorization", "Bearer new")]


def test_a_new_token_in_the_kubeconfig_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(token: str) -> str:
        return write_kubeconfig(tmp_path / "config", server.url, CA, {"token": token})

    with serving(watched_until(lambda: write("second")), ADDED) as server:
        follow_until_a_service(write("first"))
    assert tokens(server) == ["Bearer first", "Bearer second"]
    assert not caplog.records


def test_a_kubeconfig_that_is_broken_for_a_moment_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    config = tmp_path / "config"
    with serving(watched_until(lambda: replace_file(config, "{")), ADDED) as server:
        follow_until_a_service(write_kubeconfig(config, server.url, CA, {"token": "first"}))
    assert tokens(server) == ["Bearer first", "Bearer first"]
    # Once or more: another kind may begin only now, and meet the same.
    problems = {record.fields["problem"] for record in caplog.records}  # type: ignore[attr-defined]
    problem, = problems
    assert problem.startswith(f"--kubeconfig: {config}: not YAML: ")


def test_credentials_that_are_refused_are_read_again(tmp_path: Path) -> None:
    def refuse_first(exchange: Exchange) -> None:
        write("other")
        refuse(401)(exchange)

    def write(token: str) -> str:
        return write_kubeconfig(tmp_path / "config", server.url, CA, {"token": token})

    with serving(refuse_first, watched(event("ADDED", service("a"), 2), initial_events_end(2))) as server:
        follow_until_a_service(write("first"))
    assert tokens(server) == ["Bearer first", "Bearer other"]


@pytest.mark.parametrize("early", [True, False], ids=["during the request", "while it waits"])
@pytest.mark.parametrize("where", ["token file", "kubeconfig"])
def test_a_replaced_file_ends_the_wait_for_the_next_attempt(tmp_path: Path, where: str, early: bool) -> None:
    in_file = where == "token file"

    def write(token: str) -> str:
        if in_file:
            replace_file(tmp_path / "token", token)
        return write_kubeconfig(tmp_path / "config", server.url, CA,
                                {"tokenFile": "token"} if in_file and token == "old" else {"token": token})

    refused = threading.Event()

    def note(request: ApiRequest) -> None:
        if request.code == "401":
            refused.set()

    def step(exchange: Exchange) -> None:
        if early:
            write("new")
        refuse(401)(exchange)

    with serving(step, watched(event("ADDED", service("a"), 2), initial_events_end(2))) as server:
        source = KubernetesSource(
            CurrentAccess(None, write("old")), "n", observe=note, backoff=always(3600.0))
        with following(source) as observed:
            assert refused.wait(120)
            if not early:
                write("new")
            observed.wait_for(lambda o: o.names == {"a"})
    assert tokens(server) == ["Bearer old", "Bearer new"]


def test_a_replaced_file_of_no_use_is_tried_once(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1", {}, {"token": "old"})
    access = CurrentAccess(None, config)
    requests = ApiRequests(access, TokenBucket(0.0, 1), lambda _: None, JSON)
    assert not requests.files_replaced()
    replace_file(tmp_path / "config", "{")
    assert requests.files_replaced()
    with pytest.raises(AccessError):
        requests.keep_up()
    assert not requests.files_replaced()
    (tmp_path / "config").unlink()
    assert not requests.files_replaced()


def test_a_new_client_certificate_is_used_from_the_next_request_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("first", "second"):
        make_certificate(tmp_path, name)
    tls = server_tls(ssl.CERT_REQUIRED, tmp_path / "first.crt", tmp_path / "second.crt")
    names: list[str] = []

    def use(name: str) -> None:
        # As the kubelet does it: a link to another file, in one step.
        for suffix in ("crt", "key"):
            (tmp_path / "next").symlink_to(f"{name}.{suffix}")
            (tmp_path / "next").rename(tmp_path / f"client.{suffix}")

    def rotate(exchange: Exchange) -> None:
        names.append(shown_name(exchange))
        watched_until(lambda: use("second"))(exchange)

    def then(exchange: Exchange) -> None:
        names.append(shown_name(exchange))
        ADDED(exchange)

    use("first")
    with serving(rotate, then, tls=tls) as server:
        user = {"client-certificate": "client.crt", "client-key": "client.key"}
        follow_until_a_service(write_kubeconfig(tmp_path / "config", server.url, CA, user))
    assert names == ["first", "second"]
    assert not caplog.records


def test_a_new_ca_is_trusted_once_the_server_has_it(tmp_path: Path) -> None:
    make_certificate(tmp_path, "other")
    ca = tmp_path / "ca.crt"
    ca.write_bytes((tmp_path / "other.crt").read_bytes())
    attempts = 0

    def count(_: object) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 4:
            replace_file(ca, (TLS / "ca.crt").read_text())

    with serving(watched(event("ADDED", service("a"), 2), initial_events_end(2))) as server:
        config = write_kubeconfig(tmp_path / "config", server.url, {"certificate-authority": "ca.crt"})
        with following(KubernetesSource(CurrentAccess(None, config), "n", observe=count)) as observed:
            observed.wait_for(lambda o: o.names == {"a"})


def test_unchanged_files_are_not_loaded_again_for_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_kubeconfig(tmp_path / "config", "https://127.0.0.1:1", CA, {"token": "t"})
    access = CurrentAccess(None, config)
    monkeypatch.setattr("kproxy_core.kube.access.load_access", None)
    refused = access.now
    access.renew(refused)
    assert access.now is refused
    replace_file(tmp_path / "config", "changed")
    with pytest.raises(TypeError):
        access.renew(refused)


# -- credential plugins

def plugin(directory: Path, status: Json) -> Json:
    """A user whose plugin gives *status*, with ``COUNT`` for how often it has run."""
    path = directory / "plugin"
    path.write_text("#!/bin/sh\necho run >> runs\n"
                    """printf %s "$STATUS" | sed "s/COUNT/$(wc -l < runs | tr -d ' ')/"\n""")
    path.chmod(0o755)
    answer = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": status}
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin",
                     "interactiveMode": "Never", "env": [{"name": "STATUS", "value": json.dumps(answer)}]}}


def test_a_plugin_runs_once_for_all_and_again_when_its_token_is_refused(tmp_path: Path) -> None:
    with serving(watched_until(lambda: None), refuse(401), ADDED) as server:
        follow_until_a_service(write_kubeconfig(
            tmp_path / "config", server.url, CA, plugin(tmp_path, {"token": "token-COUNT"})))
    assert tokens(server) == ["Bearer token-1", "Bearer token-1", "Bearer token-2"]


def test_a_plugin_runs_again_when_its_token_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    status = {"token": "token-COUNT", "expirationTimestamp": "2020-01-01T00:00:00Z"}
    with serving(watched_until(lambda: None), ADDED) as server:
        follow_until_a_service(write_kubeconfig(
            tmp_path / "config", server.url, CA, plugin(tmp_path, status)))
    first, second = tokens(server)
    assert first != second
    assert not caplog.records


def test_a_plugin_may_return_a_certificate(tmp_path: Path) -> None:
    make_certificate(tmp_path, "plugged")
    status = {"clientCertificateData": (tmp_path / "plugged.crt").read_text(),
              "clientKeyData": (tmp_path / "plugged.key").read_text()}
    names: list[str] = []

    def step(exchange: Exchange) -> None:
        names.append(shown_name(exchange))
        watched(event("ADDED", service("a"), 2), initial_events_end(2))(exchange)

    with serving(step, tls=server_tls(ssl.CERT_REQUIRED, tmp_path / "plugged.crt")) as server:
        follow_until_a_service(write_kubeconfig(
            tmp_path / "config", server.url, CA, plugin(tmp_path, status)))
    assert names == ["plugged"]
