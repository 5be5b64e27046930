"""The time of connect() through a ClusterIP and to its endpoint, with the rules of several checkouts.

    .venv/bin/python -m tests.bench.connects [REVISION ...]

As root. The rules of each are in a network namespace of their own. One more has a single rule that translates
to the same endpoint, which shows the time of the kernel itself, and one has the rules of kube-proxy 1.36 for
a few Services. One thread on one processor measures all ways in turn, because neighbours and clock rates
change all of them together, by half within a second.
"""

import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

from kproxy_conformance.apiserver import objects
from kproxy_conformance.processes import own_name
from tests.bench import checkouts
from tests.core.namespaces import Namespace, namespace

ENDPOINT, VIP, CLIENT = ("10.128.1.0", objects.TARGET_PORT), ("10.96.0.10", 80), objects.CLIENT_POD
WAYS = {"direct": ENDPOINT, "through": VIP}
ONE_RULE = f"""
table ip one {{
    chain output {{
        type nat hook output priority -100;
        ip daddr {VIP[0]} tcp dport {VIP[1]} dnat to {ENDPOINT[0]}:{ENDPOINT[1]}
    }}
    chain postrouting {{ type nat hook postrouting priority 100; }}
}}
"""
KUBE_PROXY = checkouts.TOP / "tests/plugins/nftables/kube-proxy.nft"
_SAME_PLACES = {
    "udp": "tcp", "10.96.0.1 ": f"{VIP[0]} ", "10.96.0.1,": f"{VIP[0]},",
    "10.244.0.0/16": objects.CLUSTER_CIDR, "10.244.2.1": ENDPOINT[0], "8080": str(ENDPOINT[1]),
}
"""What `KUBE_PROXY` has, and what is dialled here."""
ROUNDS, BATCH = 300, 40
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a close without TIME_WAIT."""


def main(revisions: list[str]) -> None:
    """Print medians in microseconds, and the difference and ratio of the two ways."""
    with ExitStack() as stack:
        rules = {name: _rules(stack.enter_context(checkouts.revision(name))) for name in revisions}
        rules |= {"this checkout": _rules(checkouts.TOP), "one rule": ONE_RULE, "kube-proxy": _kube_proxys()}
        hosts = {}
        for name, text in rules.items():
            host = hosts[name] = stack.enter_context(namespace())
            host.ip("link add eth0 type veth peer name eth1", "link set eth0 up", "link set eth1 up",
                    "route add default dev eth0", "route add local 10.128.0.0/9 dev lo")
            host.nft(text)
        times = _measure(hosts)
    print(f"{'rules':20} direct  through  added  ratio")
    for name in hosts:
        direct, through = (statistics.median(times[name, way]) / 1000 for way in WAYS)
        print(f"{name:20} {direct:6.2f} {through:8.2f} {through - direct:6.2f} {through / direct:6.3f}")


def _rules(top: Path) -> str:
    """Return the rules that the checkout *top* makes of 100 Services with 5 endpoints."""
    made = objects.generate(objects.Options())
    items = [item for kind in ("services", "endpointslices", "nodes") for item in made[kind]]
    with tempfile.TemporaryDirectory(prefix=f"{own_name('bench')}-") as directory:
        Path(directory, "all.json").write_text(
            json.dumps({"apiVersion": "v1", "kind": "List", "items": items}), encoding="utf-8")
        return subprocess.run(
            [*checkouts.program(top), "render", "--mode=nftables", f"--manifests={directory}",
             f"--hostname-override={objects.NODE}", f"--cluster-cidr={objects.CLUSTER_CIDR}"],
            check=True, stdout=subprocess.PIPE, text=True).stdout


def _kube_proxys() -> str:
    text = KUBE_PROXY.read_text(encoding="utf-8")
    for theirs, ours in _SAME_PLACES.items():
        text = text.replace(theirs, ours)
    return text


def _measure(hosts: dict[str, Namespace]) -> dict[tuple[str, str], list[int]]:
    """Return the nanoseconds of each connect(), by rules and way."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    listeners = {name: host.inside(_listen) for name, host in hosts.items()}
    times: dict[tuple[str, str], list[int]] = {key: [] for key in product(hosts, WAYS)}
    order = list(times)
    for _ in range(ROUNDS):
        clients = {name: host.inside(partial(_sockets, len(WAYS) * BATCH)) for name, host in hosts.items()}
        for _ in range(BATCH):
            random.shuffle(order)  # What follows its like finds it in the processor's caches.
            for name, way in order:
                client = clients[name].pop()
                begun = time.perf_counter_ns()
                client.connect(WAYS[way])
                times[name, way].append(time.perf_counter_ns() - begun)
                server, _ = listeners[name].accept()
                client.close()
                server.close()
    return times


def _listen() -> socket.socket:
    return socket.create_server(("", ENDPOINT[1]), backlog=64)


def _sockets(count: int) -> list[socket.socket]:
    made = [socket.socket() for _ in range(count)]
    for client in made:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        client.bind((CLIENT, 0))
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
