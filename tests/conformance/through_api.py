"""Stands between the harness and kproxy: manifests of the one reach the other from an API server.

``through_api.py BENCH KPROXY ARGUMENTS``: takes ``--manifests=DIR`` out of the arguments of KPROXY, serves
the objects in DIR with the static API server in BENCH, as they come, change and go, and adds ``--master``.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

from kproxy_core.host.files import inotify
from kproxy_core.host.files.inotify import Inotify

_PR_SET_PDEATHSIG = 1


def main() -> int:
    bench, kproxy, *arguments = sys.argv[1:]
    manifests = [a.partition("=")[2] for a in arguments if a.startswith("--manifests=")]
    if not manifests:
        os.execv(kproxy, [kproxy, *arguments])
    sys.path.insert(0, bench)
    import apiserver  # type: ignore[import-not-found]

    mirror = Mirror(Path(manifests[0]), apiserver.Store({}))
    apiserver.Handler.store = mirror.store
    apiserver.Handler.options = apiserver.argparse.Namespace(
        verbose=False, watch_list="on", bookmark_interval=60.0
    )
    server = apiserver.Server(("127.0.0.1", 0), apiserver.Handler)
    for work in (server.serve_forever, mirror.follow):
        threading.Thread(target=work, daemon=True).start()
    master = f"--master=http://127.0.0.1:{server.server_address[1]}"
    command = [kproxy, master, *(a for a in arguments if not a.startswith("--manifests="))]
    process = subprocess.Popen(command, preexec_fn=_die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


class Mirror:
    """Brings an API server's store to what the files of a directory say, in the order of their writing."""

    def __init__(self, directory: Path, store: Any) -> None:
        self.store = store
        self._directory = directory
        self._objects: dict[str, Any] = {}
        self._inotify = Inotify()
        self._inotify.watch(str(directory), inotify.MOVED_TO | inotify.DELETE)
        for name in sorted(os.listdir(directory)):
            self._take(name)

    def follow(self) -> None:
        """Never returns."""
        while True:
            select.select([self._inotify], [], [])
            for notice in self._inotify.read():
                self._take(notice.name)

    def _take(self, name: str) -> None:
        if name.startswith("."):
            return
        try:
            obj = yaml.safe_load((self._directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            gone = self._objects.pop(name, None)
            if gone is not None:
                self.store.delete(self._resource(gone), self.store.key(gone))
            return
        self._objects[name] = obj
        self.store.put(self._resource(obj), obj)

    def _resource(self, obj: dict[str, Any]) -> Any:
        return next(r for r in self.store.resources.values() if r.kind == obj["kind"])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
