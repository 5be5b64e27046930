"""Throw-away network namespaces, and code that runs inside."""

import contextlib
import ctypes
import itertools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


class Namespace:
    """A network namespace with a name of its own. Sockets made inside stay inside."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *command: str, stdin: str = "", cwd: Path | None = None) -> str:
        """Run *command* in here, and return its output. Fails with its error message."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, *command],
            cwd=cwd, input=stdin, capture_output=True, text=True, check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def ip(self, *batch: str) -> None:
        """Commands of ip(8)."""
        self.run("ip", "-batch", "-", stdin="\n".join(batch) + "\n")

    def nft(self, text: str) -> None:
        self.run("nft", "-f", "-", stdin=text)

    def inside(self, action: Callable[[], T]) -> T:
        """The result of *action*, called in a thread that is in here; what it raises is raised."""
        results: list[T] = []
        errors: list[BaseException] = []

        def enter_and_act() -> None:
            try:
                with open(f"/run/netns/{self.name}", "rb") as handle:
                    if _libc.setns(handle.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(action())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=enter_and_act)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """A namespace with its loopback up, gone afterwards."""
    made = Namespace(f"kpt-{os.getpid()}-{next(_numbers)}")
    subprocess.run(["ip", "netns", "add", made.name], check=True)
    try:
        made.run("ip", "link", "set", "lo", "up")
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", made.name], check=True)
