"""A program for a kernel with an installed kproxy: the programs alone send a connection to the endpoint.

Prints the versions of Linux and what answered. The base of the mode programs nothing.
"""

import platform
import socket
import subprocess
import threading
from pathlib import Path

from kproxy_conformance.builders import endpoint_slice, full_update, node_view, plans, service
from kproxy_core.contract import Backend, BackendSettings, SyncReport, Update
from kproxy_core.model.address import Family
from kproxy_ebpf.backend import EbpfBackend
from kproxy_ebpf.kernel.programs import Compilation

CASES = (
    (Family.IPV4, socket.AF_INET, "10.96.0.1", "10.244.1.1", "32", "10.244.1.0/24"),
    (Family.IPV6, socket.AF_INET6, "fd00:96::1", "fd00:244::1", "128", "fd00:244::/64"),
)


class Rules(Backend):
    def begin(self) -> bool:
        return True

    def sync(self, update: Update) -> SyncReport:
        return SyncReport(0)


def serve(listener: socket.socket) -> None:
    while True:
        listener.accept()[0].sendall(b"pod")


def answer(family: int, address: str) -> str:
    """Return what answers at port 80, and the address that the client sees."""
    with socket.socket(family) as client:
        client.settimeout(60)
        client.connect((address, 80))
        return f"{client.recv(9).decode()} at {client.getpeername()[0]}"


def main() -> None:
    assert Compilation(start=False).are_shipped
    cgroup = Path("/sys/fs/cgroup/translated")
    cgroup.mkdir()
    (cgroup / "cgroup.procs").write_text("0")
    options = {"cgroup": str(cgroup), "pinDirectory": "/sys/fs/bpf/kproxy"}
    backend = EbpfBackend(
        Rules(), BackendSettings((Family.IPV4, Family.IPV6), options=options, count_traffic=True))
    backend.begin()
    found = []
    for family, of_sockets, vip, pod, bits, pods in CASES:
        subprocess.run(["ip", "address", "add", f"{pod}/{bits}", "dev", "lo"], check=True)
        listener = socket.create_server((pod, 8080), family=of_sockets)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        node = node_view("node1", family=family, pods=pods)
        report = backend.sync(full_update(node, plans(node, service(ip=vip), endpoint_slice("web", pod))))
        assert not report.degraded, report.degraded
        found.append(answer(of_sockets, vip))
    print(f"Linux {platform.release()}: {', '.join(found)}")


main()
