"""Throughput of a forwarded TCP connection: without rules, with the nftables mode, and with its flowtable.

    tests/guest/run .venv/bin/python -m tests.bench.flowtable

As root, in a kernel with flow offload. A guest has one processor, which sender, node and receiver keep busy,
so the CPU time for a gigabit is the inverse of the throughput. All ways take turns in windows of 0.3 s, and
the best window of each counts: neighbours on the machine can only make a window slower.
"""

import array
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from kproxy_conformance.builders import endpoint, endpoint_slice, full_update, node_view, plans, service
from kproxy_conformance.network.namespaces import Namespace
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.cleanup import cleanup

VIP, ENDPOINT = ("10.96.0.1", 80), ("192.0.2.2", 8080)
WAYS = {"no rules": ENDPOINT, "rules": VIP, "flowtable": VIP}
ROUNDS, WINDOW = 15, 0.3
"""Windows of each way, and their seconds."""

_SIOCETHTOOL = 0x8946
_SEGMENTATION = (0x1F, 0x24)
"""ETHTOOL_STSO and ETHTOOL_SGSO (linux/ethtool.h)."""


def main() -> None:
    with ExitStack() as stack:
        client, node, server = (stack.enter_context(closing(Namespace(name))) for name in ("c", "n", "s"))
        node.forward()
        node.add_veth("eth0", client, "eth0")
        node.add_veth("eth1", server, "eth0")
        for host, address, device, router in (
            (node, "198.51.100.1/24", "eth0", ""), (client, "198.51.100.2/24", "eth0", "198.51.100.1"),
            (node, "192.0.2.1/24", "eth1", ""), (server, "192.0.2.2/24", "eth0", "192.0.2.1"),
        ):  # fmt: skip
            host.add_address(address, device)
            if router:
                host.add_route("default", via=router)
        with server.entered():
            listener = stack.enter_context(closing(socket.create_server(ENDPOINT)))
        print("segments   way         Gbit/s  ratio")
        for size, on in (("64 KiB", True), ("1,448 B", False)):
            with client.entered():
                _segment_late("eth0", on=on)
            best = dict.fromkeys(WAYS, 0.0)
            for _ in range(ROUNDS):
                for way in WAYS:
                    with node.entered():
                        _program(way)
                    best[way] = max(best[way], _throughput(client, listener, WAYS[way]))
            for way, speed in best.items():
                print(f"{size:10} {way:10} {speed:7.2f} {speed / best['rules']:6.2f}", flush=True)


def _program(way: str) -> None:
    if way == "no rules":
        cleanup(dry_run=False)
        return
    devices = ["eth0", "eth1"] if way == "flowtable" else []
    backend = NftablesBackend(BackendSettings((Family.IPV4,), options={"flowtable": devices}))
    here = node_view("node1", pods="198.51.100.0/24", service_cidrs="10.96.0.0/16")
    wanted = plans(
        here, service("web", "80", ip=VIP[0]), endpoint_slice("web", endpoint(ENDPOINT[0]), ports=("8080",)))
    backend.sync(full_update(here, wanted))
    backend.close()


def _throughput(client: Namespace, listener: socket.socket, to: tuple[str, int]) -> float:
    """Return the gigabits a second that a new connection carries."""
    with _sender(client, to):
        connection, _ = listener.accept()
        with connection:
            buffer = bytearray(1 << 18)
            connection.recv_into(buffer)
            received, begun = 0, time.monotonic()
            while (now := time.monotonic()) < begun + WINDOW:
                received += connection.recv_into(buffer)
    return received * 8e-9 / (now - begun)


@contextmanager
def _sender(client: Namespace, to: tuple[str, int]) -> Iterator[None]:
    pid = os.fork()
    if not pid:
        try:
            with client.entered(), socket.create_connection(to) as sock:
                while True:
                    sock.send(bytes(1 << 18))
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _segment_late(device: str, *, on: bool) -> None:
    """Let *device* carry segments of up to 64 KiB, or only those of the size of its MTU."""
    with socket.socket() as sock:
        for command in _SEGMENTATION:
            value = array.array("I", [command, on])
            fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))


if __name__ == "__main__":
    main()
