"""The relay workers as the proxy sees them: started, told what to serve, started again when one ends."""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from kproxy_core.backend.errors import SyncFailed
from kproxy_userspace.worker import wire
from kproxy_userspace.worker.counters import GAUGES, Counter, make_counts, open_counts
from kproxy_userspace.worker.wire import Close, Command, Serve

log = logging.getLogger("kproxy.userspace")

_ANSWER_SECONDS = 30.0
_END_SECONDS = 5.0


class _Worker:
    """One process, and what it serves."""

    def __init__(self, udp_idle_seconds: float, drain_seconds: float) -> None:
        """Raises OSError if it can't be started."""
        counts = make_counts()
        ours, theirs = socket.socketpair()
        try:
            self.counts = open_counts(counts)
            arguments = [theirs.fileno(), counts, udp_idle_seconds, drain_seconds]
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-m", "kproxy_userspace.worker.main", *map(str, arguments)],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), counts],
                env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(counts)
        ours.settimeout(_ANSWER_SECONDS)
        self.control = ours
        self.served: dict[int, Serve] = {}

    @property
    def runs(self) -> bool:
        """It has not ended, nor been told to."""
        return self.control.fileno() >= 0 and self.process.poll() is None

    def hang_up(self) -> None:
        """Have it end, and with it every connection."""
        self.control.close()

    def end(self) -> None:
        """It ends by itself once the socket is closed."""
        self.hang_up()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _send(worker: _Worker, commands: Sequence[Command]) -> dict[int, str]:
    wire.send(worker.control, wire.as_values(commands))
    return {}


def _hear(worker: _Worker, commands: Sequence[Command]) -> dict[int, str]:
    """What *worker* could not do of *commands*."""
    answer = wire.receive(worker.control)
    assert isinstance(answer, list)
    failed = dict(answer)
    for command in commands:
        if isinstance(command, Serve) and command.relay not in failed:
            worker.served[command.relay] = command
        else:
            worker.served.pop(command.relay, None)
    return failed


class Workers:
    """All workers of a backend."""

    def __init__(self, count: int, udp_idle_seconds: float, drain_seconds: float) -> None:
        """*count*: 0 for one on each processor that this process may use."""
        self._count = count or len(os.sched_getaffinity(0))
        self._arguments = (udp_idle_seconds, drain_seconds)
        self._workers: list[_Worker] = []
        self._ended_counts = [0] * len(Counter)
        """What workers had counted that have ended."""
        self._wanted: dict[int, Serve] = {}
        self._telling = threading.Lock()
        self._watch: threading.Thread | None = None
        self._ended: Callable[[str], None] | None = None
        self._stop = -1

    def serve(self, changes: Mapping[int, Serve | None]) -> dict[int, str]:
        """Have relays served like this from now on, by number; None: no more. Returns what can't be, and why.

        Relays with affinity are one worker's, who alone knows which client has which endpoint.
        Workers that have ended are replaced first. Raises SyncFailed; then nothing of it is certain.
        """
        with self._telling:
            for relay, serve in changes.items():
                if serve is None:
                    self._wanted.pop(relay, None)
                else:
                    self._wanted[relay] = serve
            told: list[tuple[_Worker, list[Command]]] = []
            for number, fresh in self._replace_ended():
                worker = self._workers[number]
                commands = [
                    command
                    for relay in (self._wanted if fresh else changes)
                    if (command := self._command(number, worker, relay)) is not None
                ]
                if commands:
                    told.append((worker, commands))
            return self._tell(told)

    def stop_accepting(self, relays: Iterable[int]) -> None:
        """Have no worker accept TCP connections for these any more; those that are open go on.

        Raises SyncFailed.
        """
        with self._telling:
            closing = [number for number in relays if number in self._wanted and not self._wanted[number].udp]
            for number in closing:
                del self._wanted[number]
            self._tell([
                (worker, [Close(number, gone=False) for number in closing if number in worker.served])
                for worker in self._workers if worker.runs
            ])

    def count(self, what: Counter) -> int:
        """How many there are, or have been so far, in all workers. From any thread."""
        workers = [worker for worker in list(self._workers) if what not in GAUGES or worker.runs]
        return self._ended_counts[what] + sum(worker.counts[what] for worker in workers)

    def _tell(self, told: Sequence[tuple[_Worker, Sequence[Command]]]) -> dict[int, str]:
        """Have workers obey; which relays can't be served, and why. Raises SyncFailed."""
        failures: dict[int, str] = {}
        problem = ""
        for act in (_send, _hear):  # All work at the same time.
            for worker, commands in told:
                if worker.runs:
                    try:
                        failures |= act(worker, commands)
                    except (wire.PeerGone, TimeoutError) as error:
                        problem = f"a relay worker does not answer: {error}"
                        worker.end()
        if problem:
            raise SyncFailed(problem)
        return failures

    def _command(self, number: int, worker: _Worker, relay: int) -> Command | None:
        """What worker *number* must be told about *relay*, if anything."""
        serve = self._wanted.get(relay)
        mine = serve is not None and serve.endpoints and (
            not serve.affinity_seconds or relay % self._count == number
        )
        held = worker.served.get(relay)
        if serve is None or not mine:
            return None if held is None else Close(relay, gone=serve is None or not serve.endpoints)
        return None if held == serve else serve

    def watch(self, ended: Callable[[str], None]) -> None:
        """Call *ended* from a thread when a worker has ended by itself."""
        self._ended = ended
        self._stop = os.eventfd(0)
        self._watch = threading.Thread(target=self._wait, name="kproxy-relays", daemon=True)
        self._watch.start()

    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [worker.process.pid for worker in self._workers]

    def unwatch(self) -> None:
        """Tell nobody any more when a worker ends."""
        if self._watch is not None:
            os.eventfd_write(self._stop, 1)
            self._watch.join()
            os.close(self._stop)
            self._watch = None

    def close(self) -> None:
        """End all workers, and with them every connection."""
        self.unwatch()
        with self._telling:
            for worker in self._workers:
                worker.hang_up()
            for worker in self._workers:
                self._end(worker)
            self._workers = []

    def _replace_ended(self) -> list[tuple[int, bool]]:
        """The numbers of all workers, and whether each was started just now."""
        fresh = set(range(len(self._workers), self._count))
        for number, worker in enumerate(self._workers):
            if not worker.runs:
                self._end(worker)
                fresh.add(number)
        try:
            started = {number: _Worker(*self._arguments) for number in fresh}
        except OSError as error:
            raise SyncFailed(f"a relay worker can't be started: {error}") from error
        self._workers = [started.get(n) or self._workers[n] for n in range(self._count)]
        return [(number, number in fresh) for number in range(self._count)]

    def _end(self, worker: _Worker) -> None:
        worker.end()
        for counter in Counter:
            if counter not in GAUGES:
                self._ended_counts[counter] += worker.counts[counter]
            worker.counts[counter] = 0

    def _wait(self) -> None:
        """The watch's thread: sleeps until a worker's end of its socket is closed."""
        reported: set[int] = set()
        while True:
            waiting = select.poll()
            waiting.register(self._stop, select.POLLIN)
            current = {}
            for worker in list(self._workers):
                if worker.process.pid not in reported and worker.control.fileno() >= 0:
                    waiting.register(worker.control, 0)
                    current[worker.control.fileno()] = worker
            for fd, _ in waiting.poll(1000):
                if fd == self._stop:
                    return
                worker = current[fd]
                reported.add(worker.process.pid)
                log.error("a relay worker has ended", extra={"fields": {"pid": worker.process.pid}})
                if self._ended is not None:
                    self._ended("a relay worker has ended")
