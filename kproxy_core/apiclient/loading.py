"""The configuration of the API client, as loaded by the kubernetes package in a child process.

Importing that package costs 5 to 30 MiB, see `loader`. The child hands back what a connection needs and ends;
it is started again when a file changes, the credentials expire or the API server answers 401.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

import kproxy_core

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Directory with the token and the CA that the kubelet mounts into a pod."""

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
    """The reason why nothing else is set."""


class Load:
    """A configuration that a child process is loading."""

    def __init__(self, master: str, kubeconfig: str) -> None:
        """Start to load *kubeconfig*, with *master* in place of its server; with neither, the pod's own.

        Raises OSError.
        """
        # The import path is no variable of the environment: a plugin, which may be Python too, inherits that.
        path = [str(Path(kproxy_core.__file__).parents[1]), *sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from kproxy_core.apiclient.loader import main; main()"
        # In a session of its own, so that a plugin ends with it.
        self._child = subprocess.Popen(
            [sys.executable, "-S", "-c", program, master, kubeconfig, SERVICE_ACCOUNT],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def result(self) -> Loaded:
        """Wait for the configuration. Call once. Raises NotLoaded."""
        with self._child:
            try:
                answer, complaint = self._child.communicate(timeout=LOAD_SECONDS)
            except subprocess.TimeoutExpired:
                _end(self._child)
                raise NotLoaded(
                    f"not loaded within {LOAD_SECONDS} s; does a credential plugin hang?") from None
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
