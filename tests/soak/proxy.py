"""A kproxy that is started, killed and watched by its log."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from kproxy_conformance.open_files import open_files
from kproxy_conformance.processes import children
from tests.core.namespaces import Namespace
from tests.patience import PATIENCE
from tests.switch.room import KPROXY

Json = dict[str, Any]


REPAIRED = ("repaired foreign changes", "full sync found differences", "first sync")
"""Messages of syncs after which the kernel holds everything."""

LOOKS = 3
"""How often the descriptors are listed, a second apart."""


class Entry(NamedTuple):
    """A log line, and the monotonic time at which it was read."""

    at: float
    fields: Json

    @property
    def message(self) -> str:
        return str(self.fields["msg"])


_CONNECTION = re.compile("socket:|tcp6? (?!.* 0A$)")
"""0A is TCP_LISTEN, as /proc/net/tcp has it. No table has TCP sockets that the peer has reset."""
_TABLES = {
    **dict.fromkeys(("tcp", "tcp6", "udp", "udp6", "raw", "raw6"), (9, 1, 2, 3)),
    "unix": (6, 4), "netlink": (9, 1, 3), "packet": (8, 3),
}  # fmt: skip
"""Tables below /proc/PID/net: the columns of the inode, and of what describes a socket."""


class Usage(NamedTuple):
    """What a process and its children hold."""

    rss: int
    """Bytes, of the process itself."""
    files: tuple[str, ...]
    """What the descriptors lead to, without `connections`."""
    connections: int
    """TCP sockets that do not listen. At rest those to the API server, without the watches that back off."""
    threads: int
    children: int

    @property
    def descriptors(self) -> int:
        return len(self.files)


class SoakFailed(Exception):
    """Something that makes going on useless."""


class Proxy:
    """One kproxy after another, on one node."""

    def __init__(self, node: Namespace, directory: Path, options: Mapping[str, object], master: str) -> None:
        self.starts = 0
        self.problems: list[str] = []
        """Log lines that no healthy proxy writes."""
        self.mode = ""
        self._node = node
        self._directory = directory
        self._options = options
        self._master = master
        self._config = directory / "config.conf"
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._entries: list[Entry] = []

    def configure(self, mode: str) -> None:
        """Write the configuration file for *mode*. A running proxy follows it."""
        self.mode = mode
        new = self._config.with_suffix(".new")
        new.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode,
            **self._options,
        }))  # fmt: skip
        new.rename(self._config)

    def start(self) -> None:
        """Start it, and return when it is healthy."""
        self.starts += 1
        self._forget()
        log = self._directory / f"kproxy-{self.starts}.log"
        self._process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._node.name}", KPROXY, "--config", str(self._config),
             "--master", self._master, "--hostname-override", "here", "--logging-format", "json", "-v", "2"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process, log), daemon=True).start()
        self.wait_for("first sync of both families", lambda: self._first_syncs() == 2)
        self.wait_for("health", self.is_healthy)

    def kill(self) -> None:
        """End it without notice."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> float:
        """Ask it to end. Return the seconds that it took."""
        started = time.monotonic()
        self._signal(signal.SIGTERM)
        return time.monotonic() - started

    def stop(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self._signal(signal.SIGTERM)

    def command(self, *arguments: str) -> str:
        """Run a command of kproxy on the node. Raises SoakFailed with its words if it fails."""
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{self._node.name}", KPROXY, *arguments],
            capture_output=True, text=True, check=False, timeout=PATIENCE)  # fmt: skip
        if done.returncode:
            raise SoakFailed(f"kproxy {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def clean_up(self) -> None:
        """Remove all traces of the modes, as after an uninstallation."""
        self.command("--cleanup", "--config", str(self._config))

    def switch(self, mode: str) -> None:
        """Change the mode as an operator does."""
        self.mode = mode
        self.command("switch", mode)

    def is_healthy(self) -> bool:
        """Return the answer of the health page."""
        return self._page("-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:10256/healthz") == "200"

    def is_retiring(self) -> bool:
        """Return whether a mode that no longer serves still holds anything, or nobody answers that."""
        page = self._page("http://127.0.0.1:10249/metrics")
        return not page or "kproxy_retiring_connections{" in page

    def _page(self, *arguments: str) -> str:
        command = ["nsenter", f"--net=/run/netns/{self._node.name}", "curl", "-s", "-m", "5", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def usage(self) -> Usage:
        """Measure the running process.

        Descriptors count that stay open: searches in connection tracking open two for some milliseconds.
        """
        pid = self.pid
        held = set(open_files(pid).items())
        for _ in range(LOOKS - 1):
            time.sleep(1)
            sockets = _sockets(pid)
            held &= open_files(pid).items()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        files = [sockets.get(name, name) for _, name in held]
        others = tuple(name for name in files if not _CONNECTION.match(name))
        return Usage(
            rss=int(status["VmRSS"].split()[0]) * 1024,
            files=others,
            connections=len(files) - len(others),
            threads=int(status["Threads"]),
            children=len(self.children()),
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def children(self) -> list[int]:
        """Process ids of its children."""
        return sorted(children(self.pid))

    def workers(self) -> list[int]:
        """Process ids of its relay workers."""
        return [pid for pid in self.children() if "worker" in _command(pid)]

    def wait_until_retired(self, seconds: float) -> None:
        """Wait until the modes that served before hold nothing, and all children have ended.

        Raises SoakFailed, which names those that have not.
        """
        try:
            self.wait_for(
                "end of retirement", lambda: not (self.children() or self.is_retiring()), seconds)
        except SoakFailed as error:
            raise SoakFailed(f"{error}\nchildren: {[_command(pid) for pid in self.children()]}") from error

    def entries(self, since: float) -> list[Entry]:
        """Return the log lines read from *since* on."""
        with self._changed:
            newest_first = takewhile(lambda entry: entry.at >= since, reversed(self._entries))
            return list(newest_first)[::-1]

    def wait_for(self, what: str, done: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until *done*, which is asked after each log line. Raises SoakFailed."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not done():
                process = self._process
                if process is not None and process.poll() is not None:
                    raise SoakFailed(f"kproxy ended with {process.returncode} before {what}\n{self._tail()}")
                if time.monotonic() > deadline:
                    raise SoakFailed(f"not within {seconds:.0f} s: {what}\n{self._tail()}")
                self._changed.wait(0.05)

    def _first_syncs(self) -> int:
        return sum(entry.message == "first sync" for entry in self._entries)

    def _forget(self) -> None:
        with self._changed:
            self._entries.clear()

    def _tail(self) -> str:
        return "\n".join(json.dumps(entry.fields) for entry in self._entries[-8:])

    def _signal(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(number)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{number.name} did not end it within {PATIENCE:.0f} s")
            process.kill()
            process.wait()

    def _read(self, process: "subprocess.Popen[str]", path: Path) -> None:
        assert process.stderr is not None
        with process.stderr, path.open("w") as log:
            for line in process.stderr:
                at = time.monotonic()
                log.write(line)
                log.flush()
                try:
                    entry = Entry(at, json.loads(line))
                except ValueError:
                    self.problems.append(f"{path.name}: {line.rstrip()}")
                    continue
                if "traceback" in entry.fields:
                    self.problems.append(f"{path.name}: {entry.fields['traceback']}")
                with self._changed:
                    self._entries.append(entry)
                    self._changed.notify_all()


def _command(pid: int) -> str:
    """Return the command line of a process, "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _sockets(pid: int) -> dict[str, str]:
    """Return what /proc knows of the sockets in a process's namespace, by the names of their descriptors."""
    found = {}
    for table, (inode, *shown) in _TABLES.items():
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            found[f"socket:[{fields[inode]}]"] = " ".join((table, *(fields[column] for column in shown)))
    return found
