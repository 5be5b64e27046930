"""Network namespaces of the harness with a name in /run/netns, for ``ip netns exec``.

That program also hides the machine's cgroups and BPF programs from what it runs.
"""

import contextlib
import itertools
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from kproxy_conformance.network import namespaces
from kproxy_conformance.network.cgroup import NodeCgroup
from kproxy_conformance.processes import own_name

T = TypeVar("T")

_numbers = itertools.count()


class Namespace(namespaces.Namespace):
    """A network namespace with a name of its own."""

    def __init__(self, host: str = "", cgroup: NodeCgroup | None = None) -> None:
        super().__init__(f"{own_name('net')}-{next(_numbers)}{host and '-'}{host}", cgroup)
        with self.joined():
            thread = str(threading.get_native_id())
            subprocess.run(["ip", "netns", "attach", self.name, thread], check=True)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=True)
        super().close()

    def run(
        self, *argv: str, stdin: str = "", timeout: float = namespaces.COMMAND_TIMEOUT,
        cwd: Path | None = None,
    ) -> str:  # fmt: skip
        """Return the output of *argv*, without its error output. Fails with that."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, *argv],
            cwd=cwd, input=stdin, capture_output=True, text=True, check=False, timeout=timeout,
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout

    def ip(self, *batch: str) -> None:
        """Run commands of ip(8)."""
        self.run("ip", "-batch", "-", stdin="\n".join(batch) + "\n")

    def nft(self, text: str) -> None:
        self.run("nft", "-f", "-", stdin=text)

    def inside(self, action: Callable[[], T]) -> T:
        """Return the result of *action*, called in a thread in the namespace. Raises what it raises."""
        def act() -> T:
            with self.joined():
                return action()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(act).result()


@pytest.fixture
def own_network() -> Iterator[None]:
    """Move the test's thread, and what it starts, to a namespace where no other process takes a port."""
    with contextlib.closing(namespaces.Namespace("own")) as made, made.entered():
        yield


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """Yield a namespace with its loopback up, and delete it."""
    with contextlib.closing(Namespace()) as made:
        yield made
