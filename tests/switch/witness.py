"""Evidence of connections that were not answered, taken while connection tracking still knows them."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.core.namespaces import Namespace
from tests.switch.room import Failure, Load

POLL = 0.05
LIMIT = 5
"""Pieces of evidence of one run; rules and connections are a few hundred KB each."""
COMMANDS = (
    ("conntrack", "-L"), ("conntrack", "-L", "-f", "ipv6"), ("nft", "-a", "list", "ruleset"), ("ss", "-tuan"),
    ("nstat", "-asz"), ("cat", "/proc/pressure/cpu"), ("bpftool", "cgroup", "tree"),
)  # fmt: skip


class Witness:
    """A thread that writes the state of the node, the client and the pods to a file for such failures."""

    def __init__(
        self, hosts: Sequence[Namespace], loads: Sequence[Load], directory: Path,
        is_expected: Callable[[Failure], bool],
    ) -> None:  # fmt: skip
        """*is_expected*: damage explains the failure."""
        self._hosts, self._loads, self._directory, self._is_expected = hosts, loads, directory, is_expected
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        seen = [0] * len(self._loads)
        taken = 0
        while not self._ended.wait(POLL) and taken < LIMIT:
            for number, load in enumerate(self._loads):
                new, seen[number] = load.failures[seen[number] :], len(load.failures)
                silent = [failure for failure in new if failure.silence and not self._is_expected(failure)]
                if silent:
                    taken += 1
                    self._take(taken, silent)

    def _take(self, number: int, failures: Sequence[Failure]) -> None:
        """Write the state to a file, and print the lines about the clients' ports: files may not be kept."""
        path = self._directory / f"witness-{number}.txt"
        with path.open("w") as file:
            file.writelines(f"{failure}\n" for failure in failures)
            for host in self._hosts:
                for command in COMMANDS:
                    file.write(f"\n== {host.name}: {' '.join(command)}\n")
                    file.flush()
                    subprocess.run(
                        ["ip", "netns", "exec", host.name, *command], stdout=file, stderr=file, check=False)
        ports = [f"port={failure.port} " for failure in failures if failure.port]
        for line in path.read_text(errors="replace").splitlines():
            if (line.startswith("== ") and "conntrack" in line) or any(port in line for port in ports):
                print(f"witness {number}: {line}", flush=True)
