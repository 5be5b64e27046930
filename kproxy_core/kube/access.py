"""An API server and the credentials for it, kept up to date while the process runs."""

import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import msgspec

from kproxy_core.linux import packages, process

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Directory with the token and the CA that the kubelet mounts into a pod."""

PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")

LOAD_SECONDS = 60
"""Timeout in seconds for loading, including a credential plugin."""

_END_SECONDS = 2.0

Stamp = tuple[int, int, int]
"""Inode, modification time in nanoseconds and size of a file; they differ once it was replaced."""


class NotLoaded(Exception):
    """The configuration can't be used; the message says why."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An API server and the credentials for it. PEM data is inlined, whatever file it is from."""

    server: str = ""
    """URL with scheme."""
    ca: str | None = None
    """PEM certificates to trust; None: those of the system."""
    certificate: str = ""
    key: str = ""
    verify: bool = True
    server_name: str = ""
    """Name expected in the server's certificate; "": the host."""
    headers: list[tuple[str, str]] = []
    """Authorization and Impersonate-* headers."""
    proxy: str = ""
    """URL; "": none."""
    compression: bool = True
    files: list[tuple[str, Stamp | None]] = []
    """Every file read, and its stamp from before the reading."""
    expires: float | None = None
    """Expiry of the credentials in seconds since the epoch; None: unknown."""
    generated: bool = False
    """The credentials are from a plugin or provider, which may return others at any time."""
    problem: str = ""
    """Why loading failed; other fields have defaults then."""


class Load:
    """A configuration that a child process is loading with the kubernetes package.

    Importing that package costs 5 to 30 MiB, see `loader`. The child returns what a connection needs and
    ends; it is started again when a file changes, the credentials expire or the API server answers 401.
    """

    def __init__(self, master: str, kubeconfig: str, service_account: str = SERVICE_ACCOUNT) -> None:
        """Start to load *kubeconfig*, with *master* in place of its server; with neither, the pod's own.

        Raises OSError.
        """
        # In a session of its own, so that a plugin is killed with it.
        self._child = subprocess.Popen(
            process.interpreter("kproxy_core.kube.loader", master, kubeconfig, service_account),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def result(self, timeout: float = LOAD_SECONDS) -> Loaded:
        """Wait up to *timeout* seconds for the configuration. Call once. Raises NotLoaded."""
        with self._child:
            try:
                answer, complaint = self._child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                _end(self._child)
                raise NotLoaded(
                    f"not loaded within {timeout:g} s; does a credential plugin hang?") from None
        try:
            loaded = msgspec.json.decode(answer, type=Loaded)
        except (msgspec.MsgspecError, ValueError) as error:
            last = (complaint.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise NotLoaded(f"the loader failed: {last[:300]}") from error
        if loaded.problem:
            raise NotLoaded(loaded.problem)
        return loaded


def _end(child: subprocess.Popen[bytes]) -> None:
    """End *child* and a plugin that it runs: by SIGTERM, so that it removes its files, else by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_END_SECONDS)
            return


def names_a_proxy() -> bool:
    """Return whether the environment names a proxy for HTTP or HTTPS."""
    names = ("HTTP_PROXY", "HTTPS_PROXY")
    return any(os.environ.get(name) or os.environ.get(name.lower()) for name in names)


def stamp(path: str) -> Stamp | None:
    """Return the stamp of the file *path*; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class AccessError(Exception):
    """The options do not lead to an API server; the message names the option and the reason."""


class WrongOption(AccessError):
    """The options name no API server."""


class Access(Loaded, frozen=True, kw_only=True):
    """A configuration with checked URLs: *server* has host and port, and no trailing slash.

    Its certificates and its key are only in `tls`.
    """

    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""

    @property
    def authority(self) -> str:
        """``host:port``"""
        return urlsplit(self.server).netloc

    @property
    def via(self) -> str:
        """``host:port`` of the proxy, without its password; "": none."""
        return urlsplit(self.proxy).netloc.rpartition("@")[2]

    def is_outdated(self) -> bool:
        """Return whether a file was replaced, or the credentials expired."""
        if self.expires is not None and self.expires <= time.time():
            return True
        return any(stamp(path) not in (known, None) for path, known in self.files)


class AccessLoad:
    """An access that is being loaded, from *kubeconfig* (a file) and *master* (a URL).

    As in kube-proxy, *master* takes precedence over the server in *kubeconfig*, and the default is the
    cluster that this pod runs in.
    """

    def __init__(
        self, master: str | None, kubeconfig: str | None, service_account: str = SERVICE_ACCOUNT
    ) -> None:
        """Start loading. Raises AccessError."""
        if kubeconfig:
            self._option, self._server = f"--kubeconfig: {kubeconfig}", f"--kubeconfig: {kubeconfig}: server"
        elif master:
            self._option = "--master"
        elif os.environ.get("KUBERNETES_SERVICE_HOST"):
            self._option = self._server = "the service account"
        else:
            raise WrongOption("neither --master nor --kubeconfig is given, and this is not a pod of a "
                              "cluster (no KUBERNETES_SERVICE_HOST)")
        self._master = ""
        if master:
            self._server = "--master"
            self._master = _checked_url(self._server, master)
        self._load: Load | None = None
        needs_load = bool(kubeconfig) or not master or names_a_proxy()
        if problem := packages.lacking("api", *["kubernetes"] * needs_load, "urllib3"):
            raise AccessError(f"{self._option.partition(':')[0]} {problem}")
        if kubeconfig and stamp(kubeconfig) is None:
            raise WrongOption(f"{self._option}: there is no file {kubeconfig!r}")
        if needs_load:
            try:
                self._load = Load(self._master, kubeconfig or "", service_account)
            except OSError as error:
                raise AccessError(f"{self._option}: {error}") from error

    def result(self) -> Access:
        """Wait for the access. Call once. Raises AccessError."""
        try:
            loaded = self._load.result() if self._load else Loaded(server=self._master)
            url = _checked_url(self._server, loaded.server)
            fields = msgspec.structs.asdict(loaded) | {"ca": None, "certificate": "", "key": ""}
            return Access(**fields | {
                "server": url, "proxy": _checked_proxy(loaded.proxy),
                "tls": _tls(loaded) if url.startswith("https:") else None})
        except (NotLoaded, OSError) as error:
            raise AccessError(f"{self._option}: {error}") from error


def load_access(
    master: str | None, kubeconfig: str | None, service_account: str = SERVICE_ACCOUNT
) -> Access:
    """Return the access that the options name, see `AccessLoad`. Raises AccessError."""
    return AccessLoad(master, kubeconfig, service_account).result()


def _checked_url(option: str, url: str) -> str:
    """Return *url* with scheme and port; without a scheme it is http, as for client-go."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise WrongOption(f"{option}: {url!r} is not a URL: {error}") from error
    path = parts.path.rstrip("/")
    host = parts.hostname or ""
    printable = all(33 <= ord(character) < 127 for character in host + path)
    if parts.scheme not in ("http", "https") or not host or not printable:
        raise WrongOption(f"{option}: {url!r} is not an http or https URL of an API server")
    if parts.username is not None or parts.query or parts.fragment:
        raise WrongOption(f"{option}: {url!r} has more than scheme, host, port and path")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"


def _checked_proxy(url: str) -> str:
    """Return the proxy's *url*; without a scheme it is http, and SOCKS resolves names, as for client-go.

    Raises NotLoaded, without repeating the URL: it may hold a password.
    """
    if not url:
        return ""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in PROXY_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise NotLoaded(f"the proxy's URL needs a host and one of the schemes {', '.join(PROXY_SCHEMES)}")
    return parts._replace(scheme="socks5h" if parts.scheme == "socks5" else parts.scheme).geturl()


def _tls(loaded: Loaded) -> ssl.SSLContext:
    try:
        if loaded.ca is None:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=loaded.ca)
        if not loaded.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if loaded.certificate:
            with _in_memory(loaded.certificate) as certificate, _in_memory(loaded.key) as key:
                # With a password, so that OpenSSL does not ask for one on the terminal.
                context.load_cert_chain(certificate, key if loaded.key else None, password="")
    except (OSError, ValueError) as error:
        raise NotLoaded(f"can't use its certificates: {error}") from error
    return context


@contextmanager
def _in_memory(data: str) -> Iterator[str]:
    """Yield the path of a file in memory from which OpenSSL can read *data*."""
    handle = os.memfd_create("kproxy")
    try:
        os.write(handle, data.encode())
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


class CurrentAccess:
    """The access in use, shared by the threads that talk to one API server, and loaded when first needed."""

    def __init__(
        self, master: str | None, kubeconfig: str | None, service_account: str = SERVICE_ACCOUNT
    ) -> None:
        self._options = master, kubeconfig, service_account
        self._lock = threading.Lock()
        self._load: AccessLoad | None = None
        self._now: Access | None = None

    def begin(self) -> None:
        """Start loading, so that `now` waits less. Raises AccessError."""
        self._load = AccessLoad(*self._options)

    @property
    def now(self) -> Access:
        """The access as last loaded. Raises AccessError if none could be loaded yet."""
        with self._lock:
            if self._now is None:
                load, self._load = self._load or AccessLoad(*self._options), None
                self._now = load.result()
            return self._now

    def renew(self, refused: Access) -> None:
        """Load the options again if that may replace *refused* credentials.

        Raises AccessError, having changed nothing.
        """
        with self._lock:
            if self._now is refused and (refused.generated or refused.is_outdated()):
                self._now = load_access(*self._options)

    def keep_up(self) -> None:
        """Load the options again if a file was replaced or the credentials expired.

        Raises AccessError, having changed nothing.
        """
        known = self.now
        if known.is_outdated():
            self.renew(known)
