"""The package for Debian, from its installation to its purge, on each release; and without systemd."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kproxy_conformance.network.addresses import resolve
from kproxy_conformance.network.dialing import REACHED, Conversation, Outcome, Traffic, dial, wait_until
from kproxy_conformance.network.servers import EchoServers
from kproxy_conformance.network.topology import Topology
from tests.core.namespaces import Namespace
from tests.core.processes import started
from tests.install.debian import Debian, debian
from tests.install.machine import apt_get, machine, output
from tests.install.packages import NEWER, newer

SUITES = ("bookworm", "trixie", "noble")
UNIT = "kproxy.service"
WAIT = 30.0
"""Seconds."""
PAUSE = 0.02
"""Seconds between two connections."""

FORWARD = """
apiVersion: kproxy.dev/v1
kind: Forward
name: web
listen: ["{lb1}:443"]
to: ["{pod1}:8080", "{pod3}:8080"]
check: {{tcp: 1s}}
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: default}}
spec:
  clusterIP: {vip1}
  ports: [{{port: 80, targetPort: 8080}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web, namespace: default, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
ports: [{{name: "", port: 8080}}]
endpoints: [{{addresses: ["{pod2}"]}}]
"""
SERVED = {("lb1", 443): {"pod1", "pod3"}, ("vip1", 80): {"pod2"}}
"""The endpoints of each frontend."""


def address(symbol: str) -> str:
    return resolve(symbol, "ipv4")


class Client:
    """A client on another machine."""

    def __init__(self, topology: Topology) -> None:
        self._host = topology["client"]

    def attempt(self, symbol: str, port: int) -> Outcome:
        return dial(self._host, address(symbol), port)

    def attempts(self, symbol: str, port: int) -> Callable[[], Outcome]:
        return lambda: self.attempt(symbol, port)

    def conversation(self, symbol: str, port: int) -> Conversation:
        return Conversation(self._host, address(symbol), port)

    def is_served(self) -> bool:
        """Return whether each frontend leads to one of its endpoints."""
        return all(self.attempt(*frontend).endpoint in endpoints for frontend, endpoints in SERVED.items())


def add_services(node: Debian) -> None:
    symbols = {name: address(name) for name in ("lb1", "vip1", "pod1", "pod2", "pod3")}
    for name, text in (("forward", FORWARD), ("service", SERVICE)):
        output(node, "tee", f"/etc/kproxy/services/{name}.yaml", stdin=text.format(**symbols))


@pytest.mark.parametrize("suite", SUITES)
def test_connections_survive_an_upgrade_and_a_removal_and_a_purge_leaves_nothing(
    suite: str, package: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        topology = stack.enter_context(closing(Topology()))
        stack.enter_context(closing(EchoServers(topology)))
        client = Client(topology)
        node = stack.enter_context(machine(suite, tmp_path, topology["node"]))

        apt_get(node, "install", node.put(package))
        node.await_shown(UNIT, ActiveState="active", UnitFileState="enabled")
        add_services(node)
        assert wait_until(client.is_served, WAIT)

        old = client.conversation("lb1", 443)
        stack.callback(old.close)
        assert old.start().kind == REACHED
        first = node.shown(UNIT, "MainPID")
        traffic = Traffic(client.attempts("lb1", 443), PAUSE)
        apt_get(node, "install", node.put(newer(package, tmp_path)))
        assert wait_until(lambda: node.shown(UNIT, "MainPID") != first, WAIT)
        node.await_shown(UNIT, ActiveState="active", UnitFileState="enabled")
        assert output(node, "kproxy", "--version").startswith(f"kproxy {NEWER}")
        assert wait_until(client.is_served, WAIT)

        apt_get(node, "remove", "kproxy")
        assert node.shown(UNIT, "LoadState", "ActiveState") == {
            "LoadState": "not-found", "ActiveState": "inactive"}
        before = traffic.made
        assert wait_until(lambda: traffic.made > before + 10, WAIT)
        assert {outcome.kind for outcome in traffic.stop()} == {REACHED}
        assert old.exchange().kind == REACHED
        assert client.is_served()

        apt_get(node, "purge", "kproxy")
        assert client.attempt("lb1", 443).kind != REACHED
        assert output(node, "nft", "list", "ruleset") == ""
        assert output(node, "find", "/", "/run", "-xdev", "-iname", "*kproxy*") == ""


def test_without_systemd_it_is_installed_and_served_by_hand(package: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        topology = stack.enter_context(closing(Topology(make=Namespace)))
        stack.enter_context(closing(EchoServers(topology)))
        client = Client(topology)
        node = stack.enter_context(debian("trixie", tmp_path))
        network = topology["node"]
        assert isinstance(network, Namespace)

        apt_get(node, "install", node.put(package))
        shipped = output(node, "cat", f"/usr/lib/systemd/system/{UNIT}")
        assert output(node, "kproxy", "unit") == shipped
        completions = "/usr/share/bash-completion/completions/kproxy"
        assert "kproxy" in output(node, "bash", "-c", f". {completions}; complete -p kproxy")
        page = output(node, "zcat", "/usr/share/man/man8/kproxy-explain.8.gz")
        assert ".SH NAME\nkproxy\\-explain " in page
        add_services(node)
        with started(network, ["ip", "netns", "exec", network.name,
                               *node.command("kproxy", "--config=/etc/kproxy/config.yaml")]):
            assert wait_until(client.is_served, WAIT)
        assert client.is_served()
