"""How to reach the API server, and what to show it: a URL, a kubeconfig, or the cluster we run in."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class AccessError(Exception):
    """The options do not tell how to reach the API server; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One API server and our credentials for it."""

    host: str
    port: int
    base_path: str = ""
    """What stands before ``/api``; "" or with a leading and without a trailing slash."""
    tls: "ssl.SSLContext | None" = None
    """None: plain HTTP."""
    server_name: str = ""
    """The name that the server's certificate must have, if that is not the host."""
    authorization: Callable[[], str] | None = None
    """The value of the Authorization header, asked for before each request.

    Raises OSError if it can't be read now.
    """

    @property
    def authority(self) -> str:
        """``host:port`` as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def load_access(master: str | None, kubeconfig: str | None) -> Access:
    """The API server that *kubeconfig* (a file) and *master* (a URL) name.

    As kube-proxy: *master* takes precedence over the server in *kubeconfig*;
    with neither, the cluster that this pod runs in.

    Raises AccessError.
    """
    if kubeconfig:
        return _from_kubeconfig(kubeconfig, master)
    if master:
        host, port, base_path, secure = _parse_url("--master", master)
        return Access(host=host, port=port, base_path=base_path, tls=_tls() if secure else None)
    return _in_cluster()


def _parse_url(option: str, url: str) -> tuple[str, int, str, bool]:
    """Host, port, base path and whether it is https; a URL without a scheme is http, as for client-go."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
    except ValueError as error:
        raise AccessError(f"{option}: {url!r} is not a URL: {error}") from error
    path = parts.path.rstrip("/")
    printable = all(33 <= ord(character) < 127 for character in (parts.hostname or "") + path)
    if parts.scheme not in ("http", "https") or not parts.hostname or not printable:
        raise AccessError(f"{option}: {url!r} is not an http or https URL of an API server")
    if parts.username is not None or parts.query or parts.fragment:
        raise AccessError(f"{option}: {url!r} has more than scheme, host, port and path")
    return parts.hostname, port, path, secure


def _tls(ca_file: str | None = None, verify: bool = True) -> "ssl.SSLContext":
    import ssl  # 4 MB that plain HTTP does without

    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _in_cluster() -> Access:
    """What a pod knows: kubernetes.io, "Accessing the Kubernetes API from a Pod"."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise AccessError("neither --master nor --kubeconfig is given, and this is not a pod of a cluster "
                          "(no KUBERNETES_SERVICE_HOST)")
    if not port.isdigit():
        raise AccessError(f"KUBERNETES_SERVICE_PORT: {port!r} is not a port")
    try:
        tls = _tls(f"{_SERVICE_ACCOUNT}/ca.crt")
    except OSError as error:
        raise AccessError(f"can't use the service account's CA: {error}") from error
    return Access(host=host, port=int(port), tls=tls, authorization=_service_account_token)


def _service_account_token() -> str:
    # Read each time: the kubelet replaces it before it expires.
    with open(f"{_SERVICE_ACCOUNT}/token", encoding="ascii") as token:
        return f"Bearer {token.read().strip()}"


def _from_kubeconfig(path: str, master: str | None) -> Access:
    # 0.15 s and 30 MB: the price of exec plugins and all the other ways to log in.
    import tempfile

    from kubernetes.config import load_kube_config

    if not os.path.isfile(path):
        raise AccessError(f"--kubeconfig: there is no file {path!r}")
    # The package sets attributes of any object; its own would also read the environment.
    settings = SimpleNamespace(host="", api_key={}, ssl_ca_cert=None, verify_ssl=True, cert_file=None,
                               key_file=None, tls_server_name="", proxy="")
    with tempfile.TemporaryDirectory(prefix="kproxy-") as directory:
        # Keys that the file holds inline pass through files here, which the TLS context reads.
        try:
            load_kube_config(path, client_configuration=settings, persist_config=False,
                             temp_file_path=directory)
        except Exception as error:  # a wrong type anywhere in the file may raise anything
            problem = " ".join(str(error).split()) or type(error).__name__
            raise AccessError(f"--kubeconfig: {path}: {problem}") from error
        if settings.proxy:
            raise AccessError(f"--kubeconfig: {path}: proxy-url is not supported")
        option = "--master" if master else f"--kubeconfig: {path}: server"
        host, port, base_path, secure = _parse_url(option, master or settings.host)
        try:
            tls = _tls(settings.ssl_ca_cert, settings.verify_ssl) if secure else None
            if tls and settings.cert_file:
                tls.load_cert_chain(settings.cert_file, settings.key_file)
        except OSError as error:
            raise AccessError(f"--kubeconfig: {path}: can't use its certificates: {error}") from error
    # Older versions of the package keep the token under "authorization".
    token = (settings.api_key.get("BearerToken") or settings.api_key.get("authorization") or "").strip()
    if not (token.isascii() and token.isprintable()):
        raise AccessError(f"--kubeconfig: {path}: the user's token has characters that no token has")
    return Access(host=host, port=port, base_path=base_path, tls=tls, server_name=settings.tls_server_name,
                  authorization=(lambda: token) if token else None)


class CurrentAccess:
    """The access in use; shared by the threads that follow one API server."""

    def __init__(self, master: str | None, kubeconfig: str | None) -> None:
        """Raises AccessError."""
        self._options = master, kubeconfig
        self._lock = threading.Lock()
        self.now = load_access(master, kubeconfig)

    def renew(self, refused: Access) -> None:
        """Read the options' files again, unless that was done since *refused* was taken from here.

        Raises AccessError, having changed nothing.
        """
        with self._lock:
            if self.now is refused:
                self.now = load_access(*self._options)
