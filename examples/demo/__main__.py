"""The demo of kproxy: real packets through Services to real endpoints, on a node in namespaces.

``make demo`` runs this, or `examples.demo.rootless` where no namespaces can be made. The exit status is 0 if
every check passed.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from examples.demo import network, rootless, rows, terminal
from examples.demo.network import NAMES
from examples.demo.probes import Traffic, ask, dial, hear
from examples.demo.proxy import EXAMPLES, Proxy, ProxyFailed
from examples.demo.sandbox import SandboxError, enter, obstacle
from examples.demo.servers import Servers
from examples.demo.terminal import Table, Verdict
from kproxy_conformance.network.dialing import wait_until
from kproxy_conformance.network.namespaces import Namespace

MODE = "nftables"
LEAVING = "web-b"
EFFECT_DEADLINE = 20.0
"""Limit in seconds for a change to take effect, far above the usual time."""

SCALED_UP: list[dict[str, Any]] = [
    {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "search-1",
            "namespace": "shop",
            "labels": {"kubernetes.io/service-name": "search"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080}],
        "endpoints": [{"addresses": ["10.1.1.11"], "nodeName": "node1"}],
    },
]
"""The first endpoint of the Service `search`, served by the pod web-a."""


def who_answers(hosts: dict[str, Namespace], verdict: Verdict) -> None:
    """Print the table of every kind of frontend, dialled from a pod, the node and outside."""
    terminal.title("Who answers, and which source address they see")
    table = Table(
        verdict,
        [("service", 9), ("through", 12), ("", 20), ("from", 9), ("answered by", 22), ("source seen", 0)],
    )
    for row in rows.ROWS:
        found = rows.judge(row, hosts)
        answered = " ".join(sorted(found.answered_by)) or (
            "refused, as expected" if not found.trouble else "-"
        )
        seen = ", ".join(_owned(found.seen))
        trouble = f"  <- {found.trouble}" if found.trouble else ""
        table.row(
            not found.trouble,
            [row.service, row.kind, str(row.frontend), row.source, answered, seen + trouble],
        )


def _owned(addresses: frozenset[str]) -> list[str]:
    """Return *addresses* grouped by the names of their owners."""
    owners = sorted({NAMES.get(address, "a stranger") for address in addresses})
    return [
        f"{owner} {' '.join(sorted(a for a in addresses if NAMES.get(a, 'a stranger') == owner))}"
        for owner in owners
    ]


def an_endpoint_leaves(hosts: dict[str, Namespace], proxy: Proxy, servers: Servers, verdict: Verdict) -> None:
    """Remove an endpoint while a pod, the node and a client outside open connections."""
    terminal.title(f"{LEAVING} is removed while a pod, the node and a client outside open connections")
    shell, node, customer = hosts["shell"], hosts["node1"], hosts["customer"]
    with (
        Traffic(shell, rows.WEB) as from_pod,
        Traffic(node, rows.WEB_NODE_PORT) as from_node,
        Traffic(customer, rows.WEB_LOAD_BALANCER) as from_outside,
    ):
        kept = dial(shell, rows.WEB)
        while hear(kept).by != LEAVING:
            kept.close()
            kept = dial(shell, rows.WEB)
        everything = (from_pod, from_node, from_outside)
        wait_until(lambda: all(traffic.answered[LEAVING] for traffic in everything), EFFECT_DEADLINE)
        time.sleep(0.5)
        written = proxy.write("web-endpoints.yaml", proxy.without_endpoint("web-endpoints.yaml", LEAVING))
        wait_until(lambda: all(traffic.has_left(LEAVING) for traffic in everything), EFFECT_DEADLINE)
        servers.stop_accepting(LEAVING)
        time.sleep(0.5)
    failures = [failure for traffic in everything for failure in traffic.failures]
    total = sum(traffic.answered.total() for traffic in everything)
    verdict.check(
        not failures, f"{total} connections, {len(failures)} failed {' '.join(failures[:3])}".rstrip()
    )
    last = max(traffic.last.get(LEAVING, 0.0) for traffic in everything)
    late = max(last - written, 0.0)
    verdict.check(
        all(traffic.answered[LEAVING] for traffic in everything) and late < EFFECT_DEADLINE,
        f"the last one to {LEAVING} began {_milliseconds(late)} after its manifest was written"
        if late
        else f"none that began after the manifest was written reached {LEAVING}",
    )
    with kept:
        kept.send(b"still there?\n")
        verdict.check(hear(kept).by == LEAVING, f"an established connection to {LEAVING} still works")


def a_service_is_scaled_up_and_down(hosts: dict[str, Namespace], proxy: Proxy, verdict: Verdict) -> None:
    """Time a change. A Service without endpoints refuses at once, so no timeout hides the effect."""
    terminal.title("search is scaled from zero endpoints to one, and back to zero")
    written = proxy.write("search-endpoints.yaml", SCALED_UP)
    verdict.check(
        _until(hosts["shell"], answered=True),
        f"answered {_milliseconds(time.monotonic() - written)} after its first manifest was written",
    )
    removed = proxy.remove("search-endpoints.yaml")
    verdict.check(
        _until(hosts["shell"], answered=False),
        f"refused again {_milliseconds(time.monotonic() - removed)} after its removal",
    )


def _until(host: Namespace, answered: bool) -> bool:
    """Dial `search` until it answers or refuses. Return False if that takes too long."""
    deadline = time.monotonic() + EFFECT_DEADLINE
    while time.monotonic() < deadline:
        try:
            ask(host, rows.SEARCH)
        except ConnectionRefusedError:
            if not answered:
                return True
        else:
            if answered:
                return True
    return False


def how_long_it_took(proxy: Proxy, verdict: Verdict) -> None:
    """Print kproxy's own measurements, from the metrics that kube-proxy has as well."""
    terminal.title("kproxy's own figures")
    for scope in ("full", "partial"):
        name = f"kubeproxy_sync_{scope}_proxy_rules_duration_seconds"
        count, seconds = proxy.metric(f"{name}_count"), proxy.metric(f"{name}_sum")
        verdict.check(
            count > 0, f"{count:.0f} {scope} syncs, {_milliseconds(seconds / (count or 1))} each on average"
        )
    terminal.note(f"/healthz returned 200 {_milliseconds(proxy.started_in)} after the process started")
    terminal.note(f"resident memory {proxy.resident_mebibytes():.0f} MiB")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def demo() -> int:
    """Run the demo, and return the exit status."""
    verdict = Verdict()
    begun = time.monotonic()
    hosts = network.build()
    servers = Servers()
    for pod in (*network.PODS, network.BANK):
        servers.serve(hosts[pod.name], pod)
    terminal.title("A sandbox")
    terminal.note(f"{len(hosts)} hosts in network namespaces, in {time.monotonic() - begun:.1f} s:")
    terminal.aside((network.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0])
    manifests = Path("/run/shop")
    shutil.copytree(EXAMPLES / "shop", manifests)
    proxy = Proxy(hosts["node1"], Path("/run"), manifests, [
        f"--mode={MODE}", f"--config={EXAMPLES / 'kproxy.yaml'}", "--hostname-override=node1",
    ])  # fmt: skip
    terminal.note(f"on node1: {' '.join(proxy.command)}")
    with proxy:
        verdict.check(proxy.mode() == MODE, f"kproxy serves in mode {proxy.mode()}")
        who_answers(hosts, verdict)
        an_endpoint_leaves(hosts, proxy, servers, verdict)
        a_service_is_scaled_up_and_down(hosts, proxy, verdict)
        how_long_it_took(proxy, verdict)
        if verdict.failed:
            terminal.error(proxy.log_tail())
    with Traffic(hosts["customer"], rows.WEB_LOAD_BALANCER) as traffic:
        time.sleep(0.1)
    terminal.title("kproxy has exited; its rules continue to serve")
    verdict.check(
        not traffic.failures, f"{traffic.answered.total()} more connections, {len(traffic.failures)} failed"
    )
    return verdict.summary()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if missing := obstacle():
            return rootless.demo(missing)
        enter("examples.demo")
        return demo()
    except (SandboxError, ProxyFailed) as error:
        terminal.error(f"demo: {error}")
        return 1
    except BrokenPipeError:  # as in `make demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
