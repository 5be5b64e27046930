"""Comparison of relays on loopback: kproxy's workers, HAProxy in TCP mode, and a plain asyncio relay.

    python -m tests.bench.relays [--seconds 2] [--rounds 3] [--only NAME]

Each round measures all of them in turn, in a rotating order, so that other load on the machine affects all
alike. Prints medians over the rounds. HAProxy is Debian's package.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kproxy_conformance.processes import own_name
from kproxy_core.linux.relay.orders import Serve, WorkerSettings
from kproxy_core.linux.relay.pool import WorkerPool
from tests.bench import load

BULK, ECHO = 19001, 19002
"""The endpoint's ports: one discards everything, the other echoes."""


class Proxy:
    """A relay under test, with its ports and processes."""

    def __init__(self, name: str, first_port: int) -> None:
        self.name = name
        self.bulk = first_port
        self.echo = first_port + 1

    def pids(self) -> list[int]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Kproxy(Proxy):
    """kproxy's workers, as the backend starts them."""

    def __init__(self, processes: int) -> None:
        super().__init__("kproxy", 18001)
        self._workers = WorkerPool(processes, WorkerSettings(0.25, -1.0, 3600.0))
        failures = self._workers.serve({
            1: Serve(1, 1, False, "127.0.0.1", self.bulk, (("127.0.0.1", BULK),), 0),
            2: Serve(2, 2, False, "127.0.0.1", self.echo, (("127.0.0.1", ECHO),), 0),
        })
        assert not failures, failures

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.running()]

    def close(self) -> None:
        self._workers.close()


_HAPROXY = """
global
    maxconn 4000
    nbthread {threads}
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    option splice-auto
    option clitcpka
listen bulk
    bind 127.0.0.1:{bulk}
    server one 127.0.0.1:{to_bulk}
listen echo
    bind 127.0.0.1:{echo}
    server one 127.0.0.1:{to_echo}
"""


class Started(Proxy):
    """A relay that runs as a program."""

    def __init__(self, name: str, first_port: int, *argv: str) -> None:
        super().__init__(name, first_port)
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def pids(self) -> list[int]:
        return [self._process.pid]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def haproxy(directory: Path, threads: int) -> Proxy:
    text = _HAPROXY.format(threads=threads, bulk=18011, echo=18012, to_bulk=BULK, to_echo=ECHO)
    file = directory / "haproxy.cfg"
    file.write_text(text)
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    return Started("haproxy", 18011, program, "-db", "-q", "-f", str(file))


def asyncio_relay() -> Proxy:
    arguments = ["asyncio", "18021", str(BULK), "18022", str(ECHO)]
    return Started("asyncio", 18021, sys.executable, "-m", "tests.bench.relays", *arguments)


async def relay_with_asyncio(pairs: list[tuple[int, int]]) -> None:
    """Run the simplest possible relay."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def listen(port: int, to: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", to)
            await asyncio.gather(copy(reader, up_writer), copy(up_reader, writer))
            up_writer.close()
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    await asyncio.gather(*(listen(port, to) for port, to in pairs))


def resident_mib(pids: list[int]) -> float:
    """Return the proportional memory (PSS) of *pids* in MiB."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def measure(proxy: Proxy | None, seconds: float) -> dict[str, float]:
    """Measure one relay once; None: the endpoint without a relay."""
    bulk, echo = (proxy.bulk, proxy.echo) if proxy else (BULK, ECHO)
    found = {
        "1 connection, Gbit/s": load.throughput(bulk, 1, seconds),
        "64 connections, Gbit/s": load.throughput(bulk, 64, seconds),
        "connections/s": load.connections(echo, 32, seconds),
    }
    p50, p99 = load.latency(echo, 16, seconds)
    return found | {"p50, us": p50, "p99, us": p99}


def idle(proxy: Proxy, count: int) -> float:
    """Return the memory in MiB with *count* idle connections that were used once."""
    before = resident_mib(proxy.pids())
    with load.idle_connections(proxy.echo, count):
        after = resident_mib(proxy.pids())
    print(f"{proxy.name}: {before:.0f} MiB, with {count} idle connections {after:.0f} MiB", flush=True)
    return after


@contextlib.contextmanager
def proxies(only: str, processes: int) -> Iterator[list[Proxy]]:
    with (
        tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory,
        contextlib.ExitStack() as stack,
    ):  # fmt: skip
        makers = {
            "kproxy": lambda: Kproxy(processes),
            "haproxy": lambda: haproxy(Path(directory), processes),
            "asyncio": asyncio_relay,
        }
        made = []
        for name, make in makers.items():
            if only in ("", name):
                made.append(make())
                stack.callback(made[-1].close)
        time.sleep(1)
        yield made


def main() -> None:
    if sys.argv[1:2] == ["asyncio"]:
        ports = [int(argument) for argument in sys.argv[2:]]
        asyncio.run(relay_with_asyncio([(ports[0], ports[1]), (ports[2], ports[3])]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--idle", type=int, default=10_000, help="idle connections; 0: leave that out")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    load.allow_descriptors()
    with load.endpoint(BULK, ECHO), proxies(arguments.only, arguments.processes) as made:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ("direct", *(p.name for p in made))}
        for number in range(arguments.rounds):
            found["direct"].append(measure(None, arguments.seconds))
            turn = number % len(made)
            for proxy in made[turn:] + made[:turn]:
                found[proxy.name].append(measure(proxy, arguments.seconds))
                print(proxy.name, {k: round(v, 2) for k, v in found[proxy.name][-1].items()}, flush=True)
        kinds = list(found["direct"][0])
        print("| relay | " + " | ".join(kinds) + " |\n|---|" + "---:|" * len(kinds))
        for name, rounds in found.items():
            middle = [statistics.median(r[kind] for r in rounds) for kind in kinds]
            print(f"| {name} | " + " | ".join(f"{value:.4g}" for value in middle) + " |")
        if arguments.idle:
            idle(made[0], arguments.idle)


if __name__ == "__main__":
    main()
