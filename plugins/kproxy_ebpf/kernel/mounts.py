"""The cgroup whose sockets are translated, and the BPF file system that keeps objects between runs."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kproxy_core.contract import HostError

_ROOT_INODE = 1
"""Inode of the root of the whole cgroup2 tree; the root of a cgroup namespace has another (kernfs)."""
_HOST = Path("/run/host-cgroup")
"""Where the DaemonSet mounts what the node has at /sys/fs/cgroup (deploy/ebpf)."""
_USUAL_POINTS = ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSCONFIG_CMD_CREATE = 6
_libc = ctypes.CDLL(None, use_errno=True)


class _Mount(NamedTuple):
    point: Path
    kind: str


def open_cgroup(path: str = "") -> int:
    """Return a descriptor of the cgroup *path*, or of the root of the node's cgroup2 tree.

    ``ip netns exec`` hides /sys/fs/cgroup: without a mounted cgroup2 tree, one is opened without a mount
    point. In a container it is the container's own cgroup, unless the node's tree is mounted elsewhere. A
    node that is a container itself, as kind makes them, has a root of its own. Raises HostError.
    """
    if path in ("", *_USUAL_POINTS):
        for tree in _trees():
            if os.stat(tree).st_ino == _ROOT_INODE or Path(tree).is_relative_to(_HOST):
                return _open(tree)
    if path and os.path.isdir(path):
        if _kind(Path(path)) != "cgroup2":
            raise HostError(f"cgroup {path} is not a directory of a cgroup2 file system")
        return _open(path)
    for tree in _trees():
        inside = next((path[len(point) :] for point in _USUAL_POINTS if path.startswith(f"{point}/")), "")
        if inside:
            with suppress(HostError):
                return _open(f"{tree}{inside}")
    raise HostError(
        f"cgroup {path} does not exist" if path else "the root of the node's cgroup2 tree is not visible"
    )


def cgroup_id(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def is_bpf_file_system(directory: str) -> bool:
    """Return whether *directory*, or the nearest ancestor that exists, is in a BPF file system."""
    path = Path(directory)
    return _kind(next(filter(Path.exists, (path, *path.parents)))) == "bpf"


def mount_bpf_file_system(directory: str) -> None:
    """Mount a BPF file system at *directory*. Raises OSError."""
    if _libc.mount(b"bpf", os.fsencode(directory), b"bpf", 0, None):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), directory)


def _trees() -> Iterator[str]:
    """Yield the roots of cgroup2 trees: those that are mounted, or else one that is not."""
    mounted = [str(mount.point) for mount in _mounts() if mount.kind == "cgroup2"]
    yield from mounted
    if mounted:
        return
    context = _libc.syscall(_FSOPEN, b"cgroup2", 1)
    if context < 0:
        return
    _libc.syscall(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
    tree = _libc.syscall(_FSMOUNT, context, 1, 0)
    os.close(context)
    if tree >= 0:
        try:
            yield f"/proc/self/fd/{tree}/."
        finally:
            os.close(tree)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"cgroup {path}: {error.strerror}") from error


def _mounts() -> Iterator[_Mount]:
    table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    for line in table.splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].replace("\\040", " ")
        yield _Mount(Path(point), rest.split()[0])


def _kind(path: Path) -> str:
    """Return the kind of the file system at *path*: of the deepest mount, and there of the last one."""
    mounts = [mount for mount in _mounts() if path.is_relative_to(mount.point)]
    mounts.sort(key=lambda mount: len(mount.point.parts))
    return mounts[-1].kind if mounts else ""
