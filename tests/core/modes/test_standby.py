"""Two kproxys in one network namespace: one serves, the other stands by and takes over."""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_core.linux.files import FileLock
from kproxy_core.linux.namespaces import namespace_name
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.watch import generation
from tests.core.cli.test_cli import configuration
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import kproxy, running
from tests.listeners import accepting
from tests.patience import PATIENCE

VIP, SERVER = ("10.96.0.1", 80), ("192.0.2.10", 8080)


@pytest.fixture
def node() -> Iterator[Namespace]:
    """A node with one endpoint, which accepts connections until the end."""
    with namespace() as made, contextlib.ExitStack() as stack:
        made.ip(f"address add {SERVER[0]}/32 dev lo", "route add 10.96.0.0/16 dev lo")
        listener = made.inside(lambda: socket.create_server(SERVER, backlog=4096))
        stack.enter_context(accepting(listener, socket.socket.close))
        yield made


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    made = tmp_path / "manifests"
    made.mkdir()
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"clusterIP": VIP[0], "ports": [{"port": VIP[1], "targetPort": SERVER[1]}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "web-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "web"},
        },
        "ports": [{"port": SERVER[1]}], "endpoints": [{"addresses": [SERVER[0]]}],
    }
    for number, found in enumerate((service, endpoints)):
        (made / f"{number}.json").write_text(json.dumps(found))
    return made


class Client:
    """Connects to the Service again and again, and counts failures."""

    def __init__(self, node: Namespace) -> None:
        self._node = node
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: node.inside(self._run))
        self.answered = 0
        self.failures: list[OSError] = []

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def more(self) -> None:
        """Wait for 60 more connections, or for a failure."""
        wanted = self.answered + 60
        while self.answered < wanted and not self.failures:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            try:
                socket.create_connection(VIP, timeout=PATIENCE).close()
                self.answered += 1
            except OSError as error:
                self.failures.append(error)


def commits(node: Namespace) -> int:
    with node.inside(lambda: NetlinkSocket.open(NETLINK_NETFILTER)) as sock:
        return generation(sock)


STANDING_BY = "standing by: another kproxy serves this network namespace"


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_second_process_stands_by_writes_nothing_and_takes_over(
    node: Namespace, manifests: Path, mode: str
) -> None:
    options = (f"--mode={mode}", f"--manifests={manifests}", "--iptables-sync-period=200ms",
               "--iptables-min-sync-period=200ms")
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(running(node, *options))
        serving.await_health()
        with Client(node) as client:
            for number in (signal.SIGKILL, signal.SIGTERM):
                waiting = stack.enter_context(running(node, *options))
                waiting.await_log(STANDING_BY)
                before = commits(node)
                time.sleep(0.5)  # Two full syncs.
                assert commits(node) == before
                assert waiting.health()[0] == 200, "a rolling update with maxSurge waits for readiness"
                serving.end(number)
                waiting.await_health()
                client.more()
                serving = waiting
        assert client.answered > 100
        assert client.failures == []
        lock = Path("/run/kproxy", f"serving-{node.inside(namespace_name)}.lock")
        assert lock.exists()
        status, log = serving.end()
        assert not lock.exists()
    assert status == 0
    assert STANDING_BY not in log
    assert "the other kproxy has ended, taking over" in log


def test_signals_end_a_process_that_stands_by(node: Namespace, manifests: Path) -> None:
    options = ("--mode=nftables", f"--manifests={manifests}")
    with running(node, *options) as serving:
        serving.await_health()
        before = commits(node)
        for number in (signal.SIGTERM, signal.SIGINT):
            with running(node, *options) as waiting:
                waiting.await_log(STANDING_BY)
                status, log = waiting.end(number)
            assert (status, log.count("\n")) == (0, 1)
            assert "stopped" in log
        assert commits(node) == before
        assert serving.health()[0] == 200


def test_an_exclusive_process_refuses_to_stand_by(node: Namespace, manifests: Path) -> None:
    with running(node, "--mode=nftables", f"--manifests={manifests}") as serving:
        serving.await_health()
        refused = kproxy("--mode=nftables", f"--manifests={manifests}", "--exclusive", node=node)
        assert refused.returncode == 1
        assert "another kproxy serves this network namespace" in refused.stderr
        assert serving.health()[0] == 200


def test_the_mode_that_the_other_process_switched_to_is_kept(
    node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    configuration(
        file, f"mode: nftables\nkproxy: {{manifests: {manifests}, stateDirectory: {tmp_path}/state}}\n")
    with running(node, f"--config={file}") as serving:
        serving.await_health()
        with running(node, f"--config={file}") as waiting:
            waiting.await_log(STANDING_BY)
            switched = kproxy("switch", "iptables", node=node)
            assert switched.returncode == 0, switched.stderr
            serving.end()
            waiting.await_health()
            assert waiting.get(10249, "/proxyMode") == (200, "iptables")


def test_processes_in_other_network_namespaces_do_not_wait(node: Namespace, manifests: Path) -> None:
    with namespace() as other, running(node, "--mode=nftables", f"--manifests={manifests}") as serving:
        serving.await_health()
        with running(other, "--mode=nftables", f"--manifests={manifests}") as second:
            second.await_health()
            assert serving.health()[0] == second.health()[0] == 200


def test_the_lock_is_released_with_the_process_that_has_it(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_somebody_has_deleted_takes_no_other_along(tmp_path: Path) -> None:
    first = FileLock(tmp_path / "lock")
    assert first.acquire()
    (tmp_path / "lock").unlink()
    second = FileLock(tmp_path / "lock")
    assert second.acquire()
    first.release()
    assert not FileLock(tmp_path / "lock").acquire()
    second.release()


def test_only_one_process_has_the_lock_after_its_file_was_deleted(tmp_path: Path) -> None:
    first, waiting = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    first.release()
    starting = FileLock(tmp_path / "lock")
    assert starting.acquire()
    assert not waiting.acquire(), "it has opened the file that was deleted"
    waiting.release()
    assert not FileLock(tmp_path / "lock").acquire()
    starting.release()
    assert list(tmp_path.iterdir()) == []
