"""The time that counting takes a relay worker for a TCP connection, measured where it is spent.

    .venv/bin/python -m tests.bench.counted [ROUNDS]

As root. Two workers run with a timer around each statement that counts, so that a difference of 0.1 us is
seen: the CPU time of a whole connection varies by several us from one process to the next. One of them does
not count, which shows what the timers and conditions take. Connections are made in turn.
"""

import ast
import multiprocessing
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from kproxy_core.linux.relay import orders, relays, wire
from kproxy_core.linux.relay.counts import make_counts
from tests.bench import load
from tests.core.namespaces import Namespace, namespace

VIP, ECHO = "10.96.0.1", 19002
PORTS = {"not counted": 80, "counted": 81}
CONNECTIONS, AT_ONCE = 100, 16

_TIMED = "self._counted is not None"
"""The condition of the statements that count."""
_TIMER = "_now()\n_before = _now()\n_after = _now()\n_times[{}].append(_after - _before)"


class _Timers(ast.NodeTransformer):
    """Puts a timer around each statement that counts."""

    def __init__(self) -> None:
        self.found = 0

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if ast.unparse(node.test) != _TIMED:
            return self.generic_visit(node)
        *before, after, note = ast.parse(_TIMER.format(self.found)).body
        self.found += 1
        return [*before, node, after, note]


class Worker:
    """A worker that serves one relay and is timed."""

    def __init__(self, serve: orders.Serve) -> None:
        self._socket, theirs = socket.socketpair()
        self._control = wire.Channel(self._socket)
        self._result, result = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_run_timed, args=(theirs, result), daemon=True)
        self._process.start()
        self.ask(serve)

    def ask(self, command: orders.Command) -> None:
        self._control.send(wire.encoded([command]))
        select.select([self._control], [], [])
        self._control.receive()

    def end(self) -> list[list[int]]:
        """Return the nanoseconds of each timed statement."""
        self._socket.shutdown(socket.SHUT_RDWR)
        found: list[list[int]] = self._result.recv()
        self._process.join()
        return found


def _run_timed(control: socket.socket, result: Connection) -> None:
    timers = _Timers()
    program = timers.visit(ast.parse(Path(relays.__file__).read_text(encoding="utf-8")))
    times: list[list[int]] = [[] for _ in range(timers.found)]
    vars(relays).update(_now=time.perf_counter_ns, _times=times)
    code = compile(ast.fix_missing_locations(program), relays.__file__, "exec")
    exec(code, vars(relays))  # noqa: S102
    from kproxy_core.linux.relay import worker  # It takes the timed classes.

    settings = map(str, orders.WorkerSettings(0.25, -1.0, 3600.0))
    worker.main([str(os.dup(control.fileno())), str(make_counts()), *settings])
    result.send(times)


def main(host: Namespace, rounds: int) -> None:
    """Print what counting one connection takes, in microseconds."""
    host.ip(f"address add {VIP}/32 dev lo")
    redirects = [f"ip daddr {VIP} tcp dport {port} redirect to :{18000 + port}" for port in PORTS.values()]
    chain = ["type nat hook output priority -100", *redirects]
    host.nft("\n".join(["table ip bench {", "chain output {", *chain, "}", "}"]))
    with load.endpoint(ECHO - 1, ECHO):
        workers = {
            name: Worker(orders.Serve(
                port, port, False, "0.0.0.0", 18000 + port, (("127.0.0.1", ECHO),), 0,
                (None, 6, port) if name == "counted" else None))
            for name, port in PORTS.items()
        }  # fmt: skip
        for turn in range(rounds):
            for name in sorted(PORTS, reverse=turn % 2 == 0):
                _connect(PORTS[name])
                if turn % 20 == 0:
                    workers[name].ask(orders.ReportCounts())
        found = {name: worker.end() for name, worker in workers.items()}
    for name, times in found.items():
        each = [
            (statistics.median(one) - statistics.median(other), _mean(one) - _mean(other))
            for one, other in zip(times, found["not counted"], strict=True) if one
        ]
        median, mean = (sum(kind) / 1000 for kind in zip(*each, strict=True))
        print(f"{name:16} median {median:.2f} us, mean {mean:.2f} us, statements", *(
            f"{median / 1000:.2f}" for median, _ in each))


def _mean(times: Sequence[int]) -> float:
    """Return the mean without the slowest hundredth: these were interrupted."""
    return statistics.mean(sorted(times)[:len(times) * 99 // 100])


def _connect(port: int) -> None:
    """Open connections, exchange a message over each, and close them."""
    poll = select.epoll()
    open_now: dict[int, socket.socket] = {}
    asked: set[int] = set()
    waiting = CONNECTIONS
    while open_now or waiting:
        while waiting and len(open_now) < AT_ONCE:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.connect_ex((VIP, port))
            open_now[sock.fileno()] = sock
            poll.register(sock, select.EPOLLOUT)
            waiting -= 1
        for fd, _ in poll.poll():
            if fd not in asked:
                open_now[fd].send(b"x")
                asked.add(fd)
                poll.modify(fd, select.EPOLLIN)
            else:
                open_now[fd].recv(10)
                asked.discard(fd)
                open_now.pop(fd).close()
    poll.close()
    time.sleep(0.003)  # The worker closes its sockets.


if __name__ == "__main__":
    with namespace() as host, host.entered():
        main(host, int(sys.argv[1]) if len(sys.argv) > 1 else 200)
