"""Run kproxy, and write a line to a file for each call of the loop's thread that may wait for others.

``python loop_audit.py FILE kproxy ARGUMENT...`` Locks are not seen, nor what C code does by itself.
"""

import os
import socket
import sys
import sysconfig
import threading
import traceback

from kproxy_core.cli.commands import main
from kproxy_core.sync.loop import Loop

_WAITS = (
    "fcntl.flock", "fcntl.lockf", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir",
    "os.scandir", "os.symlink", "shutil.", "socket.connect", "socket.getaddrinfo", "socket.gethostby",
    "socket.getnameinfo", "time.sleep", "urllib.Request",
)
_OF_KERNEL = ("/proc/", "/sys/", "/dev/null")
_IMPORTED = tuple(
    os.path.realpath(path) + "/" for path in (*sys.path, *sysconfig.get_paths().values()) if path)
_OF_SYNC = ("iptables", "ip6tables", "ipset")
"""Programs by which backends write to the kernel."""

_on_loop = threading.local()


def _may_wait(event: str, args: tuple[object, ...]) -> bool:
    if event == "open":
        path = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else ""
        return bool(path) and not path.startswith(_OF_KERNEL) and (
            not os.path.realpath(path).startswith(_IMPORTED))
    if event == "subprocess.Popen":
        program = os.path.basename(os.fsdecode(args[0]))  # type: ignore[arg-type]
        return not program.startswith(_OF_SYNC) and "relay.worker" not in str(args[1])
    if event == "socket.connect" and isinstance(args[0], socket.socket):
        # A datagram socket's only chooses a route, and one of netlink is connected to the kernel.
        return args[0].type != socket.SOCK_DGRAM and args[0].family != socket.AF_NETLINK
    if event.startswith("os.") and args and str(args[0]).startswith(_OF_KERNEL):
        return False
    return event.startswith(_WAITS)


def audit(path: str) -> None:
    """Write what the loop's thread does from now on to the file *path*."""
    found = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    run = Loop.run

    def marked(loop: Loop) -> None:
        _on_loop.runs = True
        try:
            run(loop)
        finally:
            _on_loop.runs = False

    def hook(event: str, args: tuple[object, ...]) -> None:
        if getattr(_on_loop, "runs", False) and _may_wait(event, args):
            _on_loop.runs = False  # for the calls of this one
            calls = " < ".join(f"{call.name}:{call.lineno}" for call in traceback.extract_stack()[-2:-9:-1])
            os.write(found, f"{event}{args!r:.200}: {calls}\n".encode())
            _on_loop.runs = True

    Loop.run = marked  # type: ignore[method-assign, assignment]
    sys.addaudithook(hook)


if __name__ == "__main__":
    audit(sys.argv[1])
    sys.argv[:] = sys.argv[2:]
    main()
