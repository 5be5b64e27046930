"""A cgroup for the sockets of the node and its pods: a mode that works at sockets serves these only."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from kproxy_conformance.network.rights import MissingRight
from kproxy_conformance.processes import own_name


class NodeCgroup:
    """A cgroup (version 2) for the threads of this process that act as the node or one of its pods.

    A proxy that works at sockets attaches its programs to `path`. It is a threaded cgroup below one of the
    whole process, because only there threads of one process can be in different cgroups.
    """

    def __init__(self) -> None:
        """Raises MissingRight where cgroups can't be made."""
        self._root = _root()
        self._home = self._root / own_name("node")
        self.path = self._home / "node"
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise MissingRight("cgroups", error.strerror or str(error)) from error
        _write(self.path / "cgroup.type", "threaded")
        _write(self._home / "cgroup.procs", os.getpid())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        thread = threading.get_native_id()
        _write(self.path / "cgroup.threads", thread)
        try:
            yield
        finally:
            _write(self._home / "cgroup.threads", thread)

    def close(self) -> None:
        """Return this process and those that it started to the root cgroup, and delete both cgroups."""
        for process in (self._home / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):  # It has ended.
                _write(self._root / "cgroup.procs", process)
        for path in (self.path, self._home):
            with contextlib.suppress(OSError):
                path.rmdir()


def _root() -> Path:
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind = line.split()[:3]
        if kind == "cgroup2":
            return Path(where)
    raise MissingRight("cgroups", "no file system of type cgroup2 is mounted")


def _write(path: Path, value: object) -> None:
    path.write_text(str(value), encoding="ascii")
