"""A proxy under measurement: its CPU time, memory and metrics, and connections through it."""

import http.client
import json
import os
import select
import shlex
import socket
import statistics
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kproxy_conformance.apiserver import objects
from kproxy_core.kube.transport import PROTOBUF

METRICS_PORT, HEALTHZ_PORT = 10249, 10256
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

Json = dict[str, Any]

_PF_FORKNOEXEC = 0x40
"""Flag of a process that has been forked but has not executed a program yet (include/linux/sched.h)."""


def sh(command: str, *, check: bool = True) -> str:
    """Run a command line, and return what it prints."""
    return subprocess.run(shlex.split(command), check=check, capture_output=True, text=True).stdout


def percentile(values: Sequence[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(values) - 1, max(0, int(-(-len(values) * p // 100)) - 1))]


def summary(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> Json:
    if not values:
        return {"n": 0}
    return {"n": len(values), **{k: round(v * scale, digits) for k, v in (
        ("p50", percentile(values, 50)), ("p90", percentile(values, 90)), ("p99", percentile(values, 99)),
        ("mean", statistics.fmean(values)), ("max", max(values)))}}


class Process:
    """A process that we started, with the CPU time and memory of it and its children."""

    def __init__(self, command: Sequence[str], log: str) -> None:
        self.log = open(log, "ab")  # noqa: SIM115 - closed by stop()
        self.started = time.monotonic()
        self.popen = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT,
                                      stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self.popen.pid
        self.peak_tree = 0
        self.stopping = False
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self.stopping and self.popen.poll() is None:
            self.peak_tree = max(self.peak_tree, sum(self.rss(p) for p in self.tree() if self.has_memory(p)))
            time.sleep(0.02)

    def tree(self) -> list[int]:
        """Return the process and all its descendants."""
        pids = [self.pid]
        for pid in pids:
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as f:
                        pids.extend(int(c) for c in f.read().split())
            except OSError:
                pass
        return pids

    def has_memory(self, pid: int) -> bool:
        """Return False for a child that still shares its parent's memory."""
        try:
            with open(f"/proc/{pid}/stat") as f:
                return pid == self.pid or not int(f.read().rsplit(")", 1)[1].split()[6]) & _PF_FORKNOEXEC
        except (OSError, IndexError):
            return False

    @staticmethod
    def rss(pid: int) -> int:
        try:
            with open(f"/proc/{pid}/statm") as f:
                return int(f.read().split()[1]) * PAGE
        except (OSError, IndexError):
            return 0

    def cpu(self) -> float:
        """Seconds used by the process, its running children and those it has waited for."""
        ticks = 0
        for pid in self.tree():
            try:
                with open(f"/proc/{pid}/stat") as f:
                    ticks += sum(int(x) for x in f.read().rsplit(")", 1)[1].split()[11:15])
            except (OSError, IndexError):
                pass
        return ticks / TICK

    def memory(self) -> Json:
        peak = 0
        try:
            with open(f"/proc/{self.pid}/status") as f:
                for line in f:
                    if line.startswith("VmHWM:"):
                        peak = int(line.split()[1]) * 1024
        except OSError:
            pass
        return {"rss_mib": round(self.rss(self.pid) / 2**20, 1), "peak_mib": round(peak / 2**20, 1),
                "peak_with_children_mib": round(max(peak, self.peak_tree) / 2**20, 1)}

    def alive(self) -> bool:
        return self.popen.poll() is None

    def stop(self) -> None:
        self.stopping = True
        if self.alive():
            self.popen.terminate()
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self.log.close()


class Api:
    """The control endpoints of the API server."""

    def __init__(self, url: str) -> None:
        self.conn = http.client.HTTPConnection(url.split("//")[1], timeout=120)

    def call(self, method: str, path: str, body: object = None) -> Json:
        self.conn.request(method, path, json.dumps(body) if body is not None else None,
                          {"Content-Type": "application/json"})
        data = self.conn.getresponse().read()
        answer: Json = json.loads(data)
        return answer

    def encode_all(self) -> None:
        """List everything, in protobuf: the server encodes an object once, and not while a proxy waits."""
        accept = f"{PROTOBUF};drop=metadata.managedFields"
        for path in ("api/v1/services", "api/v1/nodes", "apis/discovery.k8s.io/v1/endpointslices"):
            self.conn.request("GET", f"/{path}", headers={"Accept": accept})
            self.conn.getresponse().read()


def metrics() -> dict[str, float]:
    """Return the proxy's own metrics by name, IPv4 or unlabelled only; nothing while it has none."""
    out: dict[str, float] = {}
    try:
        conn = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=10)
        conn.request("GET", "/metrics")
        text = conn.getresponse().read().decode()
    except OSError:
        return out
    for line in text.splitlines():
        if not line.startswith("kubeproxy_sync_") or "_bucket" in line:
            continue
        name, _, value = line.rpartition(" ")
        if 'ip_family="IPv6"' in name:
            continue
        key = name.split("{")[0]
        out[key] = out.get(key, 0.0) + float(value)
    return out


def sync_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> Json:
    """Return number and mean duration of the syncs between two metrics() results."""
    out: Json = {}
    for kind in ("sync_proxy_rules", "sync_full_proxy_rules", "sync_partial_proxy_rules"):
        name = f"kubeproxy_{kind}_duration_seconds"
        count = after.get(name + "_count", 0) - before.get(name + "_count", 0)
        total = after.get(name + "_sum", 0) - before.get(name + "_sum", 0)
        out[kind] = {"count": int(count), "sum_s": round(total, 4),
                     "mean_s": round(total / count, 5) if count else None}
    return out


class Prober:
    """Connects through Services; every endpoint address leads to one listener here."""

    def __init__(self) -> None:
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("0.0.0.0", objects.TARGET_PORT))
        self.listener.listen(4096)
        self.listener.setblocking(False)
        self.reset = struct.pack("ii", 1, 0)

    def connect(self, address: str, port: int, timeout: float = 0.02) -> tuple[str | None, float]:
        """Return the address of the endpoint that was reached, if any, and the seconds that connect()
        took."""
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO,
                     struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, self.reset)   # close with RST: no TIME_WAIT
        reached: str | None = None
        start = time.perf_counter()
        error = s.connect_ex((address, port))
        took = time.perf_counter() - start
        while True:
            try:
                peer, _ = self.listener.accept()
            except BlockingIOError:
                # A relay connects to the endpoint later.
                if error or reached or not select.select([self.listener], [], [], timeout)[0]:
                    break
                continue
            reached = peer.getsockname()[0]
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, self.reset)
            peer.close()
        s.close()
        return (reached if error == 0 else None), took
