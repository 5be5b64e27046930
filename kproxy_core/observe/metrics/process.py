"""Metrics of this process beyond those of prometheus_client, from the kernel."""

import os
import resource
import sys
import threading
from collections.abc import Iterator

from kproxy_core.backend.api import Measurement

_UNLIMITED = float(2**64)

_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}

KUBERNETES = "1.36"
"""Version of Kubernetes whose kube-proxy this process replaces."""


def _build_info(version: str) -> Measurement:
    """Return ``kubernetes_build_info``. Alerts on version skew in a cluster compare its ``git_version``."""
    major, minor = KUBERNETES.split(".")
    machine = os.uname().machine
    return Measurement(
        "kubernetes_build_info", "Always 1; the Kubernetes whose kube-proxy this replaces", "gauge", 1,
        {
            "major": major, "minor": minor, "git_version": f"v{KUBERNETES}.0+kproxy-{version}",
            "git_commit": "", "git_tree_state": "", "build_date": "", "compiler": sys.implementation.name,
            "go_version": "", "platform": f"linux/{_PLATFORMS.get(machine, machine)}",
        },
    )  # fmt: skip


def measure_process(version: str) -> Iterator[Measurement]:
    """Yield the metrics that are read at each scrape. A value that cannot be read is left out."""
    yield _build_info(version)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    yield Measurement(
        "process_virtual_memory_max_bytes", "Limit of this process's virtual memory", "gauge",
        _UNLIMITED if limit == resource.RLIM_INFINITY else limit,
    )  # fmt: skip
    received, sent = _network_bytes()
    about = "Bytes {} in this process's network namespace, by IPv4"
    if received is not None and sent is not None:
        yield Measurement(
            "process_network_receive_bytes_total", about.format("received"), "counter", received)
        yield Measurement("process_network_transmit_bytes_total", about.format("sent"), "counter", sent)
    threads = threading.active_count()
    yield Measurement("go_threads", "Threads, under the name that dashboards expect", "gauge", threads)
    yield Measurement("go_goroutines", "Threads, under the name that dashboards expect", "gauge", threads)


def _network_bytes() -> tuple[int | None, int | None]:
    """Return the bytes received and sent, from the names and values in /proc/self/net/netstat."""
    try:
        with open("/proc/self/net/netstat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("IpExt:")]
        values = dict(zip(*lines, strict=True))
        return int(values["InOctets"]), int(values["OutOctets"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
