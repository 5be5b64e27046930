"""The worker processes of the proxy. A worker that exits is replaced, and so is one that hangs."""

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kproxy_core.linux import process
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.relay import orders, wire
from kproxy_core.linux.relay.counts import GAUGES, Counter, make_counts, open_counts
from kproxy_core.linux.relay.orders import Close, Command, Endpoint, Order, Serve, WorkerSettings
from kproxy_core.model.address import parse_address
from kproxy_core.model.service import Destination, ServicePortKey

log = logging.getLogger("kproxy.relays")

HANG_SECONDS = 10.0
"""Silence in seconds after which a worker hangs: it is killed."""
PATIENCE = 1.0
"""Silence in seconds after which a worker is late: nothing waits for it until it has answered."""
_START_PATIENCE = 5.0
"""The same while no worker serves anything, so that nothing else waits."""
_LOOK_SECONDS = 0.25
"""Interval in seconds between two looks at workers that are waited for."""
_LONGEST_LOOK = 2.0
"""Limit for the silence in seconds that one look adds: both processes may have been stopped."""
_MOST_ORDERS = 500
"""Limit for the orders of one message, so that a busy worker is not silent for long."""
_EXIT_SECONDS = 2.0
"""Time limit for the exit of all workers, which reset their connections. Then they are killed."""


class Worker:
    """One worker process, and the relays that it has acknowledged. Belongs to its pool."""

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
        self.control = wire.Channel(ours)
        self.started = self._looked = time.monotonic()
        self.served: dict[int, Serve] = {}
        self.failed: dict[int, str] = {}
        """Relays that could not be opened when last ordered, with the reason."""
        self.unanswered: deque[Sequence[Command]] = deque()
        self.answers: list[Any] = []
        """Answers to questions, but for `counted`."""
        self.counted: list[Any] = []
        """Answers to `orders.ReportCounts` that no report contains yet."""
        self.silence = 0.0
        """Seconds since the last answer, or since the first message after it."""
        self.is_behind = True
        """It may lack orders: it has just been started, or was late."""
        self.exit_reported = False

    @property
    def is_running(self) -> bool:
        """True until the process exits or `hang_up` is called."""
        return self.control.fileno() >= 0 and self.process.poll() is None

    @property
    def complaint(self) -> str:
        """What to say of a worker that is late or has exited, for people."""
        return f"relay worker {self.process.pid} does not answer"

    def send(self, commands: Sequence[Command]) -> None:
        """Send one message, or as much as there is room for. Raises OSError."""
        if not self.unanswered:
            self.silence, self._looked = 0.0, time.monotonic()
        self.unanswered.append(commands)
        self.control.send(wire.encoded(commands))

    def look(self) -> None:
        """Take the answers that have arrived, or note the silence. Raises OSError."""
        now = time.monotonic()
        self.silence += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        self.control.flush()
        for answer in self.control.receive():
            self.silence = 0.0
            self._take(self.unanswered.popleft(), answer)

    def _take(self, commands: Sequence[Command], answer: list[Any]) -> None:
        match commands:
            case [orders.ReportCounts()]:
                self.counted += answer
            case [Serve() | Close(), *_]:
                failed = dict(answer)
                for order in commands:
                    if isinstance(order, (Serve, Close)):
                        self.failed.pop(order.relay, None)
                        if isinstance(order, Serve) and order.relay not in failed:
                            self.served[order.relay] = order
                        else:
                            self.served.pop(order.relay, None)
                self.failed |= failed
            case _:
                self.answers += answer

    def hang_up(self) -> None:
        """Tell the process to reset its connections and exit."""
        self.control.close()
        self.unanswered.clear()

    def end(self, deadline: float) -> None:
        """Wait for the process to exit. It is killed at *deadline*, monotonic seconds."""
        self.hang_up()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("relay worker does not exit, killing it", extra={
                "fields": {"pid": self.process.pid}})
            self.kill()

    def kill(self) -> None:
        self.hang_up()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # It may be in the kernel, waiting for a disk.
            self.process.wait(PATIENCE)


class WorkerPool:
    """All workers of the proxy, and the relays that each serves.

    Nothing waits for a worker that is late. It gets the orders that it lacks by the first `serve` after its
    answer.
    """

    def __init__(self, count: int, settings: WorkerSettings, *, patience: float = PATIENCE) -> None:
        """Start no worker yet. *count* 0 means one for each processor that this process may use.

        *patience*: the silence in seconds after which a worker is late.
        """
        self._count = count or len(os.sched_getaffinity(0))
        self._settings = settings
        self._patience = patience
        self._workers: list[Worker] = []
        self._counts_of_ended = [0] * len(Counter)
        self._wanted: dict[int, Serve] = {}
        self._ordering = threading.Lock()
        self.problem = ""
        """Which worker was late at the end of the last `serve`; "": none."""

    def serve(self, changes: Mapping[int, Serve | None]) -> dict[int, str]:
        """Serve relays as ordered, by number; None closes one. Return those that are not, with the reason.

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
            self._await(self._workers)
            self._replace_ended()
            given: dict[Worker, list[Order]] = {}
            for number, worker in enumerate(self._workers):
                if not worker.unanswered:
                    relays = {**worker.served, **self._wanted} if worker.is_behind else changes
                    given[worker] = [
                        order for relay in relays
                        if (order := self._command(number, worker, relay)) is not None]
            self._exchange(given)
            late = [worker for worker in self._workers if worker.unanswered]
            for worker in self._workers:
                worker.is_behind = worker in late
            self.problem = late[0].complaint if late else ""
            failures = {
                order.relay: reason for worker, sent in given.items() for order in sent
                if (reason := worker.failed.get(order.relay))}
            if late:
                failures |= dict.fromkeys(filter(self._is_pending, changes), self.problem)
            return failures

    def stop_accepting(self, relays: Iterable[int]) -> None:
        """Stop listening for *relays*. Open TCP connections continue. Raises HostError; then try again."""
        closing = list(relays)
        with self._ordering:
            for number in closing:
                self._wanted.pop(number, None)
            self._await(self._workers)
            self._exchange({
                worker: [
                    Close(number, endpoints_removed=False) for number in closing if number in worker.served]
                for worker in self._running() if not worker.unanswered})
            self._refuse_late()

    def count(self, counter: Counter) -> int:
        """Return the sum of *counter* over all workers, including ended ones. Callable from any thread."""
        workers = [each for each in list(self._workers) if counter not in GAUGES or each.is_running]
        return self._counts_of_ended[counter] + sum(worker.counts[counter] for worker in workers)

    def report(self) -> list[orders.Count]:
        """Return new connections since the last report. From any thread; an exited worker's are lost.

        Those of a worker that is late are in a later report.
        """
        with self._ordering:
            self._ask([orders.ReportCounts()])
            found = [orders.Count(*each) for worker in self._workers for each in worker.counted]
            for worker in self._workers:
                worker.counted = []
            return found

    def kept(self, client: str) -> dict[int, Endpoint]:
        """Return the endpoints of the affinity of *client*, by relay. From any thread."""
        with self._ordering:
            return dict(self._ask([orders.Recall(client)]))

    def reset_removed(
        self, service_ports: Mapping[int, ServicePortKey],
        is_removed: Callable[[ServicePortKey, Destination], bool],
    ) -> int:
        """Reset the TCP connections to removed endpoints. Return their number. From any thread.

        *service_ports* are those of the relays, by number; connections of other relays are kept. Raises
        HostError if a worker is late.
        """
        with self._ordering:
            removed: dict[int, set[Endpoint]] = {}
            for relay, (address, port) in self._ask([orders.ReportConnected()]):
                key = service_ports.get(relay)
                if key is not None and is_removed(key, Destination(parse_address(address), port)):
                    removed.setdefault(relay, set()).add((address, port))
            resets = [orders.Reset(relay, tuple(among)) for relay, among in removed.items()]
            number = sum(number for (number,) in self._ask(resets)) if resets else 0
            self._refuse_late()
            return number

    def running(self) -> list[Worker]:
        """Return the workers that have not been replaced. From any thread."""
        return list(self._workers)

    def check(self) -> bool:
        """Ask all workers for a sign of life, and kill those that hang. From any thread.

        Return whether a worker that was late has answered: it needs a `serve`.
        """
        with self._ordering:
            self._ask([])
            return any(worker.is_behind and not worker.unanswered for worker in self._running())

    def close(self, *, unless_wanted: bool = False) -> None:
        """End all workers, and with them every connection; *unless_wanted*: not while a relay is wanted."""
        with self._ordering:
            if unless_wanted and self._wanted:
                return
            for worker in self._workers:
                worker.hang_up()
            deadline = time.monotonic() + _EXIT_SECONDS
            for worker in self._workers:
                self._end(worker, deadline)
            self._workers = []

    def kill(self) -> None:
        """Kill all workers, and so end the wait of any thread for one of them."""
        for worker in list(self._workers):
            worker.process.kill()

    # With the lock held ------------------------------------------------------------------------

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_running]

    def _refuse_late(self) -> None:
        """Raise HostError if a worker is late."""
        for worker in self._running():
            if worker.unanswered:
                raise HostError(worker.complaint)

    def _ask(self, questions: Sequence[orders.Question]) -> list[Any]:
        """Return the answers of all running workers that are not late, but for counts."""
        self._await(self._workers)
        asked = [worker for worker in self._running() if not worker.unanswered]
        for worker in asked:
            worker.answers = []
        self._send({worker: [questions] for worker in asked})
        self._await(asked)
        return [each for worker in asked for each in worker.answers]

    def _exchange(self, given: Mapping[Worker, Sequence[Order]]) -> None:
        """Give orders to workers, and take the answers of those that are not late. Raises HostError."""
        self._send({
            worker: [sent[at:at + _MOST_ORDERS] for at in range(0, len(sent), _MOST_ORDERS)]
            for worker, sent in given.items()})
        self._await(given)
        for worker, sent in given.items():
            if sent and not worker.is_running:
                raise HostError(worker.complaint)

    def _send(self, messages: Mapping[Worker, Iterable[Sequence[Command]]]) -> None:
        for worker, of_worker in messages.items():
            try:
                for commands in of_worker:
                    worker.send(commands)
            except OSError:
                worker.kill()

    def _await(self, workers: Collection[Worker]) -> None:
        """Take the answers of *workers*, and wait for those that are not late."""
        seconds = 0.0
        while waiting := [each for each in workers if each.unanswered and each.is_running]:
            self._look_at(waiting, seconds)
            if all(self._is_late(each) for each in waiting if each.unanswered):
                return
            seconds = _LOOK_SECONDS

    def _look_at(self, workers: Collection[Worker], seconds: float) -> None:
        """Take the answers that arrive within *seconds*. Kill workers that hang."""
        poll = select.poll()
        for worker in workers:
            poll.register(
                worker.control.fileno(), select.POLLIN | select.POLLOUT * worker.control.has_unsent)
        poll.poll(seconds * 1000)
        for worker in workers:
            was_late = self._is_late(worker)
            try:
                worker.look()
            except OSError:
                worker.kill()
                continue
            fields = {"pid": worker.process.pid}
            if worker.silence >= HANG_SECONDS:
                log.error("relay worker hangs, killing it", extra={"fields": fields})
                worker.kill()
            elif self._is_late(worker) and not was_late:
                log.warning("relay worker does not answer", extra={"fields": fields})
            elif was_late and not self._is_late(worker):
                log.info("relay worker answers again", extra={"fields": fields})

    def _is_late(self, worker: Worker) -> bool:
        serves = any(each.served for each in self._running())
        return worker.silence >= (self._patience if serves else max(self._patience, _START_PATIENCE))

    def _is_pending(self, relay: int) -> bool:
        """Return whether no worker that answers serves *relay* as ordered."""
        wanted = self._wanted.get(relay)
        return wanted is not None and bool(wanted.endpoints) and not any(
            worker.served.get(relay) == wanted for worker in self._running() if not worker.unanswered)

    def _command(self, number: int, worker: Worker, relay: int) -> Order | None:
        """Return the order about *relay* for worker *number*, None if it needs none."""
        serve, held = self._wanted.get(relay), worker.served.get(relay)
        has_resting = serve is not None and bool(serve.resting)
        if serve is not None and not serve.endpoints:
            serve = None
        if serve is not None and (not serve.affinity_seconds or serve.service_port % self._count == number):
            return None if held == serve else serve
        return None if held is None else Close(relay, endpoints_removed=serve is None and not has_resting)

    def _replace_ended(self) -> None:
        """Replace workers that have exited. Raises HostError."""
        new = set(range(len(self._workers), self._count))
        for number, worker in enumerate(self._workers):
            if not worker.is_running:
                self._end(worker, time.monotonic())
                new.add(number)
        try:
            started = {number: Worker(self._settings) for number in new}
        except OSError as error:
            raise HostError("cannot start a relay worker", error) from error
        self._workers = [started.get(n) or self._workers[n] for n in range(self._count)]

    def _end(self, worker: Worker, deadline: float) -> None:
        worker.end(deadline)
        for counter in Counter:
            if counter not in GAUGES:
                self._counts_of_ended[counter] += worker.counts[counter]
            worker.counts[counter] = 0
