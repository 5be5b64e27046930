"""The demo without privileges: the shop on this machine, served in userspace mode at one address.

It needs no namespaces, rules or privileges. Each pod is a server at this machine's own address, on ports
chosen by the kernel.
"""

import contextlib
import copy
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import yaml

from examples.demo import network, terminal
from examples.demo.probes import Frontend, Traffic, ask, dial, hear
from examples.demo.proxy import EXAMPLES, Proxy
from examples.demo.sandbox import SandboxError
from examples.demo.servers import Servers
from examples.demo.terminal import Table, Verdict
from kproxy_conformance.network.dialing import wait_until
from kproxy_conformance.processes import own_name

LISTEN = "127.0.0.1"
LEAVING = "web-b"
EFFECT_DEADLINE = 20.0
"""Limit in seconds for a change to take effect, far above the usual time."""
ENOUGH = 12
"""Connections to each service port."""

_LISTENING = re.compile(r"listening service_port=(\S+) port=(\d+) at=(\S+):(\d+) protocol=(\S+)")

WHO_ANSWERS = (
    ("shop/web:http", 80, "web-a web-b web-c"),
    ("shop/web:http", 30080, "web-a web-b web-c"),
    ("shop/checkout:https", 443, "checkout-a checkout-b"),
    ("shop/checkout:https", 30443, "checkout-a checkout-b"),
    ("shop/cart", 80, "one of cart-a cart-b"),
    ("shop/names:dns", 53, "names-a"),
    ("shop/payments:api", 443, "bank"),
    ("shop/search", 80, ""),
)
"""Service port, its number or node port, and the expected endpoints; "": none."""


class ThisMachine:
    """This machine as the only host of the demo."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        return socket.socket(family, kind)

    def start(self, argv: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def own_address() -> str:
    """Return an address by which other machines reach this one. Raises SandboxError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError as error:
            raise SandboxError("this machine has only loopback addresses, which no pod may have") from error
        return str(asking.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Shop:
    """The shop's manifests, with its pods at this machine's address."""

    address: str
    ports: dict[tuple[str, int], int]
    """The port of each server, by the pod's address and port in the shop."""

    def write(self, directory: Path) -> None:
        directory.mkdir()
        for file in (EXAMPLES / "shop").iterdir():
            documents = [
                moved
                for document in yaml.safe_load_all(file.read_text())
                for item in (document["items"] if document["kind"] == "List" else [document])
                if item.get("addressType") != "IPv6"
                for moved in self._moved(item)
            ]
            (directory / f"{file.stem}.yaml").write_text(yaml.safe_dump_all(documents, sort_keys=False))

    def scaled_up(self) -> list[dict[str, Any]]:
        """Return the first endpoint of the Service `search`, served by the pod web-a."""
        return [{
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "search-1", "namespace": "shop",
                         "labels": {"kubernetes.io/service-name": "search"}},
            "ports": [{"name": "", "port": self.ports["10.1.1.11", 8080]}],
            "endpoints": [{"addresses": [self.address], "nodeName": "node1"}],
        }]  # fmt: skip

    def _moved(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Return *document*, or one slice per endpoint, because their ports differ."""
        for subset in document.get("subsets", []):
            for address in subset["addresses"]:
                for port in subset["ports"]:
                    port["port"] = self.ports[address["ip"], port["port"]]
                address["ip"] = self.address
        if document["kind"] != "EndpointSlice":
            return [document]
        slices = []
        for number, endpoint in enumerate(document["endpoints"]):
            moved = copy.deepcopy(document)
            for port in moved["ports"]:
                port["port"] = self.ports[endpoint["addresses"][0], port["port"]]
            moved["metadata"]["name"] += f"-{number}"
            moved["endpoints"] = [endpoint | {"addresses": [self.address]}]
            slices.append(moved)
        return slices


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server((LISTEN, 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in socks]


def frontends(proxy: Proxy) -> dict[tuple[str, int], Frontend]:
    """Return the addresses at which kproxy listens according to its log, by service port and port number."""
    return {
        (found[1], int(found[2])): Frontend(found[3], int(found[4]), found[5])
        for found in _LISTENING.finditer(proxy.log())
    }


def who_answers(here: ThisMachine, where: dict[tuple[str, int], Frontend], verdict: Verdict) -> None:
    """Print the table of every service port and node port."""
    terminal.title("Who answers")
    table = Table(verdict, [("service port", 20), ("port", 6), ("listens at", 16), ("answered by", 0)])
    for key, port, wanted in WHO_ANSWERS:
        frontend = where[key, port]
        try:
            found = " ".join(sorted({ask(here, frontend).by for _ in range(ENOUGH)}))
            good = found in wanted.removeprefix("one of ").split() if "one of" in wanted else found == wanted
        except ConnectionRefusedError:
            found, good = "refused, as expected" if not wanted else "refused", not wanted
        except OSError as error:
            found, good = str(error), False
        table.row(good, [key, str(port), str(frontend), found])


def an_endpoint_leaves(
    here: ThisMachine, web: Frontend, proxy: Proxy, servers: Servers, verdict: Verdict
) -> None:
    """Remove an endpoint while connections are opened."""
    terminal.title(f"{LEAVING} is removed while connections are opened")
    with Traffic(here, web) as traffic:
        kept = dial(here, web)
        while hear(kept).by != LEAVING:
            kept.close()
            kept = dial(here, web)
        time.sleep(0.3)
        written = proxy.write("web-endpoints.yaml", proxy.without_endpoint("web-endpoints.yaml", LEAVING))
        wait_until(lambda: traffic.has_left(LEAVING), EFFECT_DEADLINE)
        servers.stop_accepting(LEAVING)
        time.sleep(0.3)
    verdict.check(
        not traffic.failures,
        f"{traffic.answered.total()} connections, {len(traffic.failures)} failed "
        f"{' '.join(traffic.failures[:3])}".rstrip(),
    )
    late = max(traffic.last.get(LEAVING, 0.0) - written, 0.0)
    verdict.check(
        late < EFFECT_DEADLINE,
        f"the last one to {LEAVING} began {late * 1000:.1f} ms after its manifest was written",
    )
    with kept:
        kept.send(b"still there?\n")
        verdict.check(hear(kept).by == LEAVING, f"an established connection to {LEAVING} still works")


def a_service_is_scaled_up_and_down(
    here: ThisMachine, search: Frontend, proxy: Proxy, shop: Shop, verdict: Verdict
) -> None:
    terminal.title("search is scaled from zero endpoints to one, and back to zero")
    begun = proxy.write("search-endpoints.yaml", shop.scaled_up())
    verdict.check(_until(here, search, answered=True),
                  f"answered {(time.monotonic() - begun) * 1000:.1f} ms after its first manifest was written")
    begun = proxy.remove("search-endpoints.yaml")
    verdict.check(_until(here, search, answered=False),
                  f"refused again {(time.monotonic() - begun) * 1000:.1f} ms after its removal")


def _until(here: ThisMachine, frontend: Frontend, *, answered: bool) -> bool:
    deadline = time.monotonic() + EFFECT_DEADLINE
    while time.monotonic() < deadline:
        try:
            ask(here, frontend)
            if answered:
                return True
        except ConnectionRefusedError:
            if not answered:
                return True
        except ConnectionResetError:  # It was being opened when the last endpoint was removed.
            if answered:
                raise
    return False


def what_it_says(proxy: Proxy, verdict: Verdict) -> None:
    terminal.title("kproxy's own figures")
    relayed = proxy.metric("kproxy_userspace_accepted_connections_total")
    verdict.check(relayed > 0, f"{relayed:.0f} connections relayed")
    terminal.note(f"/healthz returned 200 {proxy.started_in * 1000:.0f} ms after the process started")
    terminal.note(f"resident memory {proxy.resident_mebibytes():.0f} MiB, without the relay processes")


def demo(missing: str) -> int:
    """Run the demo, and return the exit status. *missing*: why no namespaces can be made."""
    verdict = Verdict()
    here, servers = ThisMachine(), Servers()
    shop = Shop(own_address(), {})
    for pod in (*network.PODS, network.BANK):
        for port, given in servers.serve_at(shop.address, pod).items():
            shop.ports[pod.ipv4, port] = given
    terminal.title("On relays")
    terminal.aside(f"No network namespaces can be made here ({missing}).\n"
                   "The pods are servers on this machine, and kproxy relays to them without a rule.\n"
                   "For the whole demo: CAP_SYS_ADMIN and CAP_NET_ADMIN, or unshare -Urnm make demo")
    with TemporaryDirectory(prefix=f"{own_name('demo')}-") as directory:
        manifests = Path(directory, "shop")
        shop.write(manifests)
        healthz, metrics = free_ports(2)
        proxy = Proxy(here, Path(directory), manifests, [
            "--mode=userspace", f"--userspace-listen={LISTEN}", "--hostname-override=node1",
            f"--healthz-bind-address={LISTEN}:{healthz}", f"--metrics-bind-address={LISTEN}:{metrics}",
        ], healthz_port=healthz, metrics_port=metrics)  # fmt: skip
        terminal.note(" ".join(proxy.command))
        with proxy:
            where = frontends(proxy)
            verdict.check(proxy.mode() == "userspace", f"kproxy serves in mode {proxy.mode()}")
            who_answers(here, where, verdict)
            web = where["shop/web:http", 80]
            an_endpoint_leaves(here, web, proxy, servers, verdict)
            a_service_is_scaled_up_and_down(here, where["shop/search", 80], proxy, shop, verdict)
            what_it_says(proxy, verdict)
            if verdict.failed:
                terminal.error(proxy.log_tail())
        terminal.title("kproxy has exited, and its ports are closed")
        try:
            ask(here, web)
            verdict.check(False, "a connection was still accepted")
        except ConnectionRefusedError:
            verdict.check(True, "refused")
    return verdict.summary()
