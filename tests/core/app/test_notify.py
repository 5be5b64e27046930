"""What a kproxy that is a service of systemd tells it, over a socket as systemd's."""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kproxy_core.app.notify import Heartbeat, ServiceManager
from tests.core.cli.test_cli import manifests, node
from tests.core.namespaces import Namespace
from tests.core.processes import KPROXY, started
from tests.patience import PATIENCE

__all__ = ["manifests", "node"]

STANDING_BY = "STATUS=standing by: another kproxy serves this network namespace"


class Systemd:
    """The receiving end, and everything that was received."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)
        self.received: list[list[str]] = []

    def next(self) -> list[str]:
        """Wait for a message, and return its assignments."""
        self.received.append(self.socket.recv(65536).decode().split("\n"))
        return self.received[-1]

    def wait_for(self, wanted: Callable[[list[str]], object]) -> list[str]:
        """Return the first message that is *wanted*."""
        while not wanted(message := self.next()):
            pass
        return message

    def is_silent(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.next()
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(PATIENCE)

    @property
    def everything(self) -> set[str]:
        return {assignment for message in self.received for assignment in message}

    def service(self, node: Namespace, manifests: Path, *under: str) -> list[str]:
        """Return the command of a kproxy as a service of this systemd, with a watchdog of one second."""
        return [
            "ip", "netns", "exec", node.name, "env", f"NOTIFY_SOCKET={self.address}", "WATCHDOG_USEC=1000000",
            *under, KPROXY, "--mode=nftables", f"--manifests={manifests}",
        ]  # fmt: skip


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(str(tmp_path / "notify"))
    with contextlib.closing(made.socket):
        yield made


# A real proxy


def test_a_service_is_ready_once_it_is_in_sync_and_alive_until_it_stops(
    systemd: Systemd, node: Namespace, manifests: Path
) -> None:
    with started(node, systemd.service(node, manifests)) as proxy:
        systemd.wait_for(lambda message: "READY=1" in message)
        assert "10.96.0.10" in node.run("nft", "list", "table", "ip", "kproxy")
        served = systemd.wait_for(lambda message: "STATUS=mode nftables: 1 Services" in message)
        assert served[1:] == ["READY=1", "WATCHDOG=1"]
        for _ in range(3):
            assert "WATCHDOG=1" in systemd.next()
        assert proxy.end()[0] == 0
    assert "STOPPING=1" in systemd.wait_for(lambda message: "STOPPING=1" in message)
    assert systemd.is_silent()


def test_a_service_that_lacks_a_right_is_never_ready_and_says_why(
    systemd: Systemd, node: Namespace, manifests: Path
) -> None:
    command = systemd.service(node, manifests, "setpriv", "--bounding-set=-all", "--inh-caps=-all")
    with started(node, command) as proxy:
        status, log = proxy.ended()
    assert status == 1
    assert "run as root or with CAP_NET_ADMIN" in log
    assert "READY=1" not in systemd.everything


def test_a_service_that_stands_by_says_so_and_is_ready_once_it_serves(
    systemd: Systemd, node: Namespace, manifests: Path, tmp_path: Path
) -> None:
    second = Systemd(str(tmp_path / "second"))
    with contextlib.closing(second.socket), started(node, systemd.service(node, manifests)) as serving:
        systemd.wait_for(lambda message: "READY=1" in message)
        with started(node, second.service(node, manifests)) as waiting:
            assert second.next() == [STANDING_BY]
            assert second.is_silent()
            serving.end()
            second.wait_for(lambda message: "READY=1" in message)
            assert waiting.end()[0] == 0


# Its parts


class FakeLoop:
    """A loop that makes calls when it is told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._posted = threading.Semaphore(0)

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self._posted.release()

    def await_posts(self, number: int) -> None:
        for _ in range(number):
            assert self._posted.acquire(timeout=PATIENCE)


def heartbeat(manager: ServiceManager, loop: FakeLoop, *, alive: bool = True) -> Heartbeat:
    return Heartbeat(
        manager, loop.post, prepare=lambda: None, status=lambda: "well", alive=lambda: alive)


def test_a_stuck_loop_sends_nothing(systemd: Systemd) -> None:
    loop = FakeLoop()
    beating = heartbeat(ServiceManager(systemd.address, watchdog=0.02), loop)
    beating.start()
    loop.await_posts(3)
    assert systemd.is_silent()
    loop.calls[0]()
    assert systemd.next() == ["STATUS=well", "WATCHDOG=1"]
    beating.stop()
    assert systemd.next()[0] == "STOPPING=1"
    loop.calls[0]()
    assert systemd.is_silent()


def test_a_proxy_that_is_not_alive_lets_the_watchdog_starve(systemd: Systemd) -> None:
    beating = heartbeat(ServiceManager(systemd.address, watchdog=60), FakeLoop(), alive=False)
    beating.set_ready()
    assert systemd.next() == ["STATUS=well", "READY=1"]


def test_without_a_watchdog_only_the_state_is_told(systemd: Systemd) -> None:
    heartbeat(ServiceManager(systemd.address), FakeLoop()).set_ready()
    assert systemd.next() == ["STATUS=well", "READY=1"]


@pytest.mark.parametrize(("watchdog", "interval"), [(None, 10), (120.0, 10), (20.0, 10), (3.0, 1.5)])
def test_messages_are_sent_twice_as_often_as_the_watchdog_wants(
    watchdog: float | None, interval: float
) -> None:
    assert heartbeat(ServiceManager("@", watchdog), FakeLoop()).interval == interval


def test_a_process_that_is_no_service_starts_no_thread() -> None:
    before = threading.active_count()
    loop = FakeLoop()
    beating = heartbeat(ServiceManager(), loop)
    beating.start()
    assert threading.active_count() == before
    beating.set_ready()
    beating.stop()
    assert loop.calls == []


@pytest.mark.parametrize(("given", "watchdog"), [
    ({"WATCHDOG_USEC": "120000000"}, 120.0),
    ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
    ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "1"}, None),
    ({"WATCHDOG_USEC": "0"}, None),
    ({"WATCHDOG_USEC": "soon"}, None),
    ({}, None),
])  # fmt: skip
def test_children_do_not_inherit_the_variables(given: dict[str, str], watchdog: float | None) -> None:
    environment = {"NOTIFY_SOCKET": "/run/systemd/notify", "HOME": "/", **given}
    manager = ServiceManager.from_environment(environment)
    assert (manager.address, manager.watchdog) == ("/run/systemd/notify", watchdog)
    assert environment == {"HOME": "/"}


def test_abstract_addresses_and_texts_of_several_lines() -> None:
    systemd = Systemd(f"@kproxy-test-{secrets.token_hex(8)}")
    with contextlib.closing(systemd.socket):
        ServiceManager(systemd.address).send("STATUS=one\nREADY=1", "WATCHDOG=1")
        assert systemd.next() == ["STATUS=one READY=1", "WATCHDOG=1"]


def test_a_socket_that_is_gone_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager(str(tmp_path / "gone"))
    manager.send("READY=1")
    manager.send("READY=1")
    assert [record.message for record in caplog.records] == ["cannot notify systemd"]
