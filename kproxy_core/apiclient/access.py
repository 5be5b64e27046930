"""How to reach the API server, and what to show it: a URL, a kubeconfig, or the cluster we run in."""

import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kproxy_core.apiclient.proxies import NotAProxy, Proxy, parse_proxy, proxy_of_environment

if TYPE_CHECKING:
    import ssl

    from kproxy_core.apiclient.kubeconfig import Cluster, User

_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

Stamp = tuple[int, int, int]
"""Inode, modification time in nanoseconds and size of a file: another one, and it was replaced."""


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
    proxy: Proxy | None = None
    compression: bool = True
    """Whether lists may come compressed."""
    files: tuple[tuple[str, Stamp | None], ...] = ()
    """What else was read for this, as it was then."""
    expires: float | None = None
    """When the credentials do, in seconds since the epoch; None: not known."""

    @property
    def authority(self) -> str:
        """``host:port`` as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_outdated(self, wall: float) -> bool:
        """Whether a file was replaced, or the credentials expired before *wall* (seconds since the epoch)."""
        if self.expires is not None and self.expires <= wall:
            return True
        return any(_stamp(path) not in (stamp, None) for path, stamp in self.files)


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
        return Access(host=host, port=port, base_path=base_path, tls=_tls() if secure else None,
                      proxy=_proxy(None, "", secure, host, port))
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


def _proxy(url: str | None, option: str, secure: bool, host: str, port: int) -> Proxy | None:
    """The proxy at *url*, which *option* gave, else the environment's."""
    try:
        if url:
            return parse_proxy(url)
    except NotAProxy as error:
        raise AccessError(f"{option}: proxy-url: {error}") from error
    try:
        return proxy_of_environment(os.environ, secure, host, port)
    except NotAProxy as error:
        raise AccessError(f"the environment's {error}") from error


def _tls(ca_file: str | None = None, ca: bytes | None = None, verify: bool = True) -> "ssl.SSLContext":
    """Raises OSError, ValueError."""
    import ssl  # 4 MB that plain HTTP does without

    context = ssl.create_default_context(cafile=ca_file, cadata=ca.decode("ascii") if ca else None)
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
    files = _stamps(f"{_SERVICE_ACCOUNT}/ca.crt")
    try:
        tls = _tls(f"{_SERVICE_ACCOUNT}/ca.crt")
    except OSError as error:
        raise AccessError(f"can't use the service account's CA: {error}") from error
    return Access(host=host, port=int(port), tls=tls, files=files,
                  authorization=_token_of_file(f"{_SERVICE_ACCOUNT}/token"),
                  proxy=_proxy(None, "", True, host, int(port)))


def _token_of_file(path: str) -> Callable[[], str]:
    def authorization() -> str:
        # Read each time: whoever writes it replaces it before it expires.
        with open(path, encoding="ascii", errors="replace") as file:
            token = file.read().strip()
        if not _is_token(token):
            raise OSError(f"{path} holds no token")
        return f"Bearer {token}"
    return authorization


def _is_token(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


def _from_kubeconfig(path: str, master: str | None) -> Access:
    from kproxy_core.apiclient.kubeconfig import NotUsable, Plugged, read_kubeconfig, run_plugin

    try:
        before = _stamps(path)
        cluster, user = read_kubeconfig(path)
        option = "--master" if master else f"--kubeconfig: {path}: server"
        host, port, base_path, secure = _parse_url(option, master or cluster.server)
        proxy = _proxy(cluster.proxy_url, f"--kubeconfig: {path}", secure, host, port)
        if user.auth_provider is not None:
            raise NotUsable("auth-provider is not supported; use a credential plugin (exec)")
        if user.act_as:
            raise NotUsable("acting as another user (as) is not supported")
        plugged = Plugged("", b"", b"", None)
        if user.exec is not None and not (user.token or user.token_file):
            plugged = run_plugin(user.exec, cluster, os.path.dirname(os.path.abspath(path)))
        files = before + _stamps(cluster.certificate_authority, user.client_certificate, user.client_key)
        return Access(
            host=host, port=port, base_path=base_path,
            tls=_tls_of(cluster, user, plugged.certificate, plugged.key) if secure else None,
            server_name=cluster.tls_server_name or "", authorization=_authorization(user, plugged.token),
            proxy=proxy, compression=not cluster.disable_compression, files=files, expires=plugged.expires)
    except FileNotFoundError as error:
        raise AccessError(f"--kubeconfig: {path}: there is no file {error.filename!r}") from error
    except (OSError, NotUsable) as error:
        raise AccessError(f"--kubeconfig: {path}: {error}") from error


def _tls_of(cluster: "Cluster", user: "User", certificate: bytes, key: bytes) -> "ssl.SSLContext":
    """TLS with *cluster* as *user*, or with what a plugin gave in place of the user's certificate."""
    from kproxy_core.apiclient.kubeconfig import NotUsable, decoded

    ca = cluster.certificate_authority_data
    try:
        context = _tls(None if ca else cluster.certificate_authority,
                       decoded("certificate-authority-data", ca) if ca else None,
                       not cluster.insecure_skip_tls_verify)
        if not certificate and user.client_certificate_data:
            certificate = decoded("client-certificate-data", user.client_certificate_data)
        if not key and user.client_key_data:
            key = decoded("client-key-data", user.client_key_data)
        if certificate or user.client_certificate:
            with (_file_of(certificate, user.client_certificate) as certificate_file,
                  _file_of(key, user.client_key) as key_file):
                # With a password, so that OpenSSL asks nobody on the terminal for one.
                context.load_cert_chain(certificate_file or "", key_file, password="")
    except FileNotFoundError as error:
        paths = (cluster.certificate_authority, user.client_certificate, user.client_key)
        missing = [path for path in paths if path and _stamp(path) is None]
        raise NotUsable(f"there is no file {', '.join(missing)}") from error
    except (OSError, UnicodeError) as error:
        raise NotUsable(f"can't use its certificates: {error}") from error
    return context


@contextmanager
def _file_of(data: bytes, path: str | None) -> Iterator[str | None]:
    """A name under which OpenSSL can read *data*, or *path* if there is none. Nothing goes to a disk."""
    if not data:
        yield path
        return
    handle = os.memfd_create("kproxy")
    try:
        os.write(handle, data)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


def _authorization(user: "User", plugged: str) -> Callable[[], str] | None:
    from kproxy_core.apiclient.kubeconfig import NotUsable

    if user.token_file:
        made = _token_of_file(user.token_file)
        if not user.token:
            made()
        return made
    token = (user.token or plugged).strip()
    if token:
        if not _is_token(token):
            raise NotUsable("the user's token has characters that no token has")
        return lambda: f"Bearer {token}"
    if user.username:
        login = b64encode(f"{user.username}:{user.password or ''}".encode()).decode()
        return lambda: f"Basic {login}"
    return None


def _stamps(*paths: str | None) -> tuple[tuple[str, Stamp | None], ...]:
    return tuple((path, _stamp(path)) for path in paths if path)


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class CurrentAccess:
    """The access in use; shared by the threads that follow one API server.

    *wall*: seconds since the epoch, which is what the expiry of credentials is told in.
    """

    def __init__(
        self, master: str | None, kubeconfig: str | None, wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises AccessError."""
        self._options = master, kubeconfig
        self._wall = wall
        self._lock = threading.Lock()
        self.now = load_access(master, kubeconfig)

    def renew(self, refused: Access) -> None:
        """Read the options' files again, unless that was done since *refused* was taken from here.

        Raises AccessError, having changed nothing.
        """
        with self._lock:
            if self.now is refused:
                self.now = load_access(*self._options)

    def keep_up(self) -> None:
        """Read the options' files again if one was replaced, or what they gave has expired.

        Raises AccessError, having changed nothing.
        """
        known = self.now
        if known.is_outdated(self._wall()):
            self.renew(known)
