"""The worker processes of the proxy. A worker that exits is replaced, and so is one that hangs."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kproxy_core.linux import process
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.relay import orders, wire
from kproxy_core.linux.relay.counts import GAUGES, Counter, make_counts, open_counts
from kproxy_core.linux.relay.orders import Close, Endpoint, Order, Serve, WorkerSettings
from kproxy_core.model.address import parse_address
from kproxy_core.model.service import Destination, ServicePortKey

_ANSWER_SECONDS = 10.0
"""After which a worker hangs: ten thousand relays are opened in one."""
_EXIT_SECONDS = 5.0


class Worker:
    """One worker process, and the relays that it has acknowledged."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Start the process. Raises OSError."""
        counts = make_counts()
        ours, theirs = socket.socketpair()
        try:
            self.counts = open_counts(counts)
            self.process = subprocess.Popen(
                process.interpreter("kproxy_core.linux.relay.worker", theirs.fileno(), counts, *settings),
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), counts],
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(counts)
        ours.settimeout(_ANSWER_SECONDS)
        self.control = ours
        self.started = time.monotonic()
        self.served: dict[int, Serve] = {}
        self.exit_reported = False

    @property
    def is_running(self) -> bool:
        """True until the process exits or `hang_up` is called."""
        return self.control.fileno() >= 0 and self.process.poll() is None

    def hang_up(self) -> None:
        """Tell the process to reset its connections and exit."""
        self.control.close()

    def end(self) -> None:
        """Wait for the process to exit. It is killed if it takes too long."""
        self.hang_up()
        try:
            self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait()


def _exchange(
    messages: Sequence[tuple[Worker, Sequence[orders.Command]]]
) -> tuple[dict[Worker, list[Any]], str]:
    """Send commands to workers. Return their answers, and a problem, or "".

    A worker that does not answer is killed.
    """
    answers: dict[Worker, list[Any]] = {}
    problem = ""
    for are_sent in (False, True):  # All workers work at the same time.
        for worker, commands in messages:
            if commands:
                try:
                    if not worker.is_running:
                        raise ConnectionError("it has exited")
                    if are_sent:
                        answers[worker] = wire.receive(worker.control)
                    else:
                        wire.send(worker.control, wire.encoded(commands))
                except OSError as error:
                    problem = f"relay worker {worker.process.pid} does not answer: {error}"
                    worker.kill()
    return answers, problem


class WorkerPool:
    """All workers of the proxy, and the relays that each serves."""

    def __init__(self, count: int, settings: WorkerSettings) -> None:
        """Start no worker yet. *count* 0 means one for each processor that this process may use."""
        self._count = count or len(os.sched_getaffinity(0))
        self._settings = settings
        self._workers: list[Worker] = []
        self._counts_of_ended = [0] * len(Counter)
        self._wanted: dict[int, Serve] = {}
        self._ordering = threading.Lock()

    def serve(self, changes: Mapping[int, Serve | None]) -> dict[int, str]:
        """Serve relays as ordered, by number; None closes one. Return those that failed, with the reason.

        One worker serves all relays with affinity of one service port, because it alone knows the clients'
        endpoints. Replaces exited workers first. Raises HostError, after which the state of every relay is
        unknown.
        """
        with self._ordering:
            for relay, serve in changes.items():
                if serve is None:
                    self._wanted.pop(relay, None)
                else:
                    self._wanted[relay] = serve
            new = self._replace_ended()
            return self._order([
                (worker, [
                    order for relay in (self._wanted if number in new else changes)
                    if (order := self._command(number, worker, relay)) is not None
                ])
                for number, worker in enumerate(self._workers)
            ])  # fmt: skip

    def stop_accepting(self, relays: Iterable[int]) -> None:
        """Stop listening for *relays*. Open TCP connections continue. Raises HostError."""
        with self._ordering:
            closing = [number for number in relays if number in self._wanted]
            for number in closing:
                del self._wanted[number]
            self._order([
                (worker, [Close(number, endpoints_removed=False)
                          for number in closing if number in worker.served])
                for worker in self._workers if worker.is_running
            ])  # fmt: skip

    def count(self, counter: Counter) -> int:
        """Return the sum of *counter* over all workers, including ended ones. Callable from any thread."""
        workers = [each for each in list(self._workers) if counter not in GAUGES or each.is_running]
        return self._counts_of_ended[counter] + sum(worker.counts[counter] for worker in workers)

    def report(self) -> list[orders.Count]:
        """Return new connections since the last report. From any thread; an exited worker's are lost."""
        return [orders.Count(*each) for each in self._ask(orders.ReportCounts())]

    def kept(self, client: str) -> dict[int, Endpoint]:
        """Return the endpoints of the affinity of *client*, by relay. From any thread."""
        return dict(self._ask(orders.Recall(client)))

    def reset_removed(
        self, service_ports: Mapping[int, ServicePortKey],
        is_removed: Callable[[ServicePortKey, Destination], bool],
    ) -> int:
        """Reset the TCP connections to removed endpoints. Return their number. From any thread.

        *service_ports* are those of the relays, by number; connections of other relays are kept.
        """
        removed: dict[int, set[Endpoint]] = {}
        for relay, (address, port) in self._ask(orders.ReportConnected()):
            key = service_ports.get(relay)
            if key is not None and is_removed(key, Destination(parse_address(address), port)):
                removed.setdefault(relay, set()).add((address, port))
        resets = [orders.Reset(relay, tuple(among)) for relay, among in removed.items()]
        return sum(number for (number,) in self._ask(*resets)) if resets else 0

    def _ask(self, *questions: orders.Question) -> list[Any]:
        """Return the answers of all running workers. The next sync replaces those that do not answer."""
        with self._ordering:
            answers, _ = _exchange([(worker, questions) for worker in self._workers if worker.is_running])
        return [each for answer in answers.values() for each in answer]

    def running(self) -> list[Worker]:
        """Return the workers that have not been replaced. From any thread."""
        return list(self._workers)

    def check(self) -> None:
        """Kill workers that do not answer. From any thread."""
        self._ask(orders.Recall(""))

    def close(self, *, unless_wanted: bool = False) -> None:
        """End all workers, and with them every connection; *unless_wanted*: not while a relay is wanted."""
        with self._ordering:
            if unless_wanted and self._wanted:
                return
            for worker in self._workers:
                worker.hang_up()
            for worker in self._workers:
                self._end(worker)
            self._workers = []

    def kill(self) -> None:
        """Kill all workers, and so end the wait of any thread for one of them."""
        for worker in list(self._workers):
            worker.process.kill()

    def _order(self, orders: Sequence[tuple[Worker, Sequence[Order]]]) -> dict[int, str]:
        """Send orders and return the relays that failed, with the reason. Raises HostError."""
        answers, problem = _exchange(orders)
        failures: dict[int, str] = {}
        for worker, commands in orders:
            if worker not in answers:
                continue
            failed = dict(answers[worker])
            failures |= failed
            for command in commands:
                if isinstance(command, Serve) and command.relay not in failed:
                    worker.served[command.relay] = command
                else:
                    worker.served.pop(command.relay, None)
        if problem:
            raise HostError(problem)
        return failures

    def _command(self, number: int, worker: Worker, relay: int) -> Order | None:
        """Return the order about *relay* for worker *number*, None if it needs none."""
        serve, held = self._wanted.get(relay), worker.served.get(relay)
        has_resting = serve is not None and bool(serve.resting)
        if serve is not None and not serve.endpoints:
            serve = None
        if serve is not None and (not serve.affinity_seconds or serve.service_port % self._count == number):
            return None if held == serve else serve
        return None if held is None else Close(relay, endpoints_removed=serve is None and not has_resting)

    def _replace_ended(self) -> set[int]:
        """Replace workers that have exited. Return the numbers of the new ones."""
        new = set(range(len(self._workers), self._count))
        for number, worker in enumerate(self._workers):
            if not worker.is_running:
                self._end(worker)
                new.add(number)
        try:
            started = {number: Worker(self._settings) for number in new}
        except OSError as error:
            raise HostError("cannot start a relay worker", error) from error
        self._workers = [started.get(n) or self._workers[n] for n in range(self._count)]
        return new

    def _end(self, worker: Worker) -> None:
        worker.end()
        for counter in Counter:
            if counter not in GAUGES:
                self._counts_of_ended[counter] += worker.counts[counter]
            worker.counts[counter] = 0
