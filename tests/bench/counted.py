"""The CPU time of a relay worker for a TCP connection, counted and not.

    .venv/bin/python -m tests.bench.counted [ROUNDS]

As root. One worker has three relays behind rules that redirect: one does not count, one has a single
frontend, and one has several, so that it asks the kernel which one was dialled. All are measured in turn.
"""

import select
import socket
import statistics
import sys
import time
from pathlib import Path

from kproxy_userspace.kernel.workers import WorkerPool
from kproxy_userspace.worker.wire import Serve, WorkerSettings
from tests.bench import load
from tests.core.namespaces import Namespace, namespace

VIP, ECHO = "10.96.0.1", 19002
PORTS = {"not counted": 80, "one frontend": 81, "several": 82}
CONNECTIONS, AT_ONCE = 100, 16


def main(host: Namespace, rounds: int) -> None:
    """Print medians of microseconds for one connection, and of what counting adds."""
    host.ip(f"address add {VIP}/32 dev lo")
    redirects = [f"ip daddr {VIP} tcp dport {port} redirect to :{18000 + port}" for port in PORTS.values()]
    chain = ["type nat hook output priority -100", *redirects]
    host.nft("\n".join(["table ip bench {", "chain output {", *chain, "}", "}"]))
    workers = WorkerPool(1, WorkerSettings(0.25, -1.0, 3600.0))
    relays = {
        port: Serve(port, False, "0.0.0.0", 18000 + port, (("127.0.0.1", ECHO),), 0,
                    (VIP, port) if name != "not counted" else None, name == "several")
        for name, port in PORTS.items()
    }
    assert not workers.serve(relays)
    (worker,) = workers.running()
    found: dict[str, list[float]] = {name: [] for name in PORTS}
    with load.endpoint(ECHO - 1, ECHO):
        for turn in range(-2, rounds):
            for name in sorted(PORTS, reverse=turn % 2 == 0):
                before = _cpu(worker.process.pid)
                _connect(PORTS[name])
                if turn >= 0:
                    found[name].append((_cpu(worker.process.pid) - before) / CONNECTIONS)
            if turn % 20 == 0:
                workers.report()
    workers.close()
    without = found["not counted"]
    for name, times in found.items():
        added = statistics.median(one - other for one, other in zip(times, without, strict=True))
        print(f"{name:12} {statistics.median(times):6.1f} us, added {added:+.1f} us")


def _cpu(process: int) -> float:
    """Return the microseconds that *process* has run."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1000


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
