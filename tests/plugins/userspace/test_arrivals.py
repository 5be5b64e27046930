"""Clients on their way to a relay when its last portal is deleted: none is refused or redirected."""

import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, plans, service
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_nftables.backend import NftablesBackend
from kproxy_userspace import backend as backend_module
from kproxy_userspace import family as family_module
from kproxy_userspace import retire as retire_module
from kproxy_userspace.kernel.portals import NftPortals, open_portals
from tests.patience import PATIENCE

from .endpoints import connect, endpoints, name_of, reached
from .proxies import NODE, VIP, Proxy, Start

pytestmark = pytest.mark.usefixtures("node")

HOST, HOST_6 = "192.0.2.2", "fd00:1::1"
VIP_6 = "fd00:96::1"
OFTEN = 5

_RELAYED = "meta l4proto tcp ct reply proto-src != 9001"

LOST = {
    # Connection tracking has the first packet, the relay has none.
    "SYN": ("input priority 0", f"{_RELAYED} tcp flags & (syn|ack) == syn"),
    # The relay has answered, and connection tracking does not know.
    "SYN-ACK untracked": ("output priority -300", "tcp sport != 9001 tcp flags & (syn|ack) == (syn|ack)"),
    "SYN-ACK": ("input priority 0", f"{_RELAYED} tcp flags & (syn|ack) == (syn|ack)"),
    # For the client and connection tracking the handshake is over, for the relay it is not.
    "ACK": ("input priority 0", f"{_RELAYED} tcp flags & (syn|ack) == ack"),
}
"""Hooks and matches that lose a segment between client and relay."""


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide by connections, not by time."""
    monkeypatch.setattr(retire_module, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(family_module, "GRACE_SECONDS", 0.0)


def nft(text: str) -> str:
    return subprocess.run(["nft", text], capture_output=True, text=True, check=True).stdout


def until(what: str, holds: object) -> None:
    deadline = time.monotonic() + PATIENCE
    assert callable(holds)
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def losing(what: str) -> Iterator[None]:
    """Lose these segments."""
    where, match = LOST[what]
    nft(f"add table inet lossy {{ chain lossy {{ type filter hook {where}; {match} counter drop; }}; }}")
    try:
        yield
    finally:
        nft("delete table inet lossy")


@contextmanager
def on_the_way(vip: str = VIP, port: int = 80, many: int = 1) -> Iterator[list[socket.socket]]:
    """Start clients each of which has lost a segment."""
    with ExitStack() as stack:
        clients = []
        for _ in range(many):
            before = lost()
            client = stack.enter_context(
                socket.socket(socket.AF_INET6 if ":" in vip else socket.AF_INET, socket.SOCK_STREAM))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect((vip, port))
            until("nothing was lost", lambda before=before: lost() > before)
            client.settimeout(PATIENCE)
            clients.append(client)
        yield clients


def lost() -> int:
    """Return the number of lost segments."""
    return int(nft("list table inet lossy").partition("counter packets ")[2].split()[0])


@contextmanager
def shown_if_late() -> Iterator[None]:
    """After a timeout, show the sockets, tracked connections, rules and threads."""
    try:
        yield
    except TimeoutError as error:
        commands = (["ss", "-tanpoie"], ["conntrack", "-L", "-p", "tcp"], ["nft", "list", "ruleset"])
        shown = [
            subprocess.run(each, capture_output=True, text=True, check=False).stdout for each in commands]
        for frame in sys._current_frames().values():
            shown += traceback.format_stack(frame)
        raise AssertionError("\n".join([str(error), *shown])) from error


@contextmanager
def mode(family: Family) -> Iterator[NftablesBackend]:
    """A backend of another mode."""
    other = NftablesBackend(BackendSettings((family,)))
    try:
        yield other
    finally:
        other.close()


def retired(proxy: Proxy) -> bool:
    """Return whether no client is waited for."""
    found = proxy.backend.retire()
    assert found.errors == ()
    return not found.is_needed


@pytest.mark.parametrize(("what", "vip", "host", "portals"), [
    *((what, VIP, HOST, open_portals) for what in LOST),
    *((what, VIP_6, HOST_6, open_portals) for what in LOST),
    ("SYN", VIP, HOST, NftPortals),
])  # fmt: skip
def test_a_client_on_its_way_is_served_when_another_mode_takes_over(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str, vip: str, host: str, portals: object
) -> None:
    monkeypatch.setattr(backend_module, "open_portals", portals)
    of, family = service(ip=vip), Family.IPV6 if ":" in vip else Family.IPV4
    with endpoints((host, 9001)), mode(family) as other:
        proxy = start()
        proxy.serve(of, host, family=family)
        with losing(what), on_the_way(vip) as (client,):
            found = plans(NODE[family], of, endpoint_slice(of.name.name, host, ports=["9001"]))
            other.sync(full_update(NODE[family], found))
            assert [retired(proxy) for _ in range(OFTEN)] == [False] * OFTEN
            assert reached(vip, 80) == f"{host}:9001"  # through the other mode
            nft("flush table inet lossy")
            with shown_if_late():
                assert name_of(client) == f"{host}:9001"
            client.sendall(b"still here;")
            assert name_of(client) == "still here"
        until("a client is still waited for", lambda: retired(proxy))
        assert reached(vip, 80) == f"{host}:9001"


def test_a_client_that_was_reset_is_served_when_it_returns_from_the_same_port(start: Start) -> None:
    proxy = start()
    proxy.serve(service(), HOST)
    with socket.socket() as client:
        client.bind(("192.0.2.1", 0))
        place = client.getsockname()
        with suppress(ConnectionResetError):  # There is no endpoint yet.
            client.connect((VIP, 80))
            assert client.recv(1) == b"", "there is no endpoint to send anything"
    with endpoints((HOST, 9001)):
        assert [retired(proxy) for _ in range(OFTEN)] == [False] * OFTEN
        with socket.create_connection((VIP, 80), PATIENCE, place) as client:
            assert name_of(client) == f"{HOST}:9001"


@pytest.mark.parametrize(
    ("what", "portals"), [*((what, open_portals) for what in LOST), ("SYN", NftPortals)])
def test_a_client_on_its_way_is_served_when_affinity_changes(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str, portals: object
) -> None:
    monkeypatch.setattr(backend_module, "open_portals", portals)
    with endpoints((HOST, 9001)):
        proxy = start()
        proxy.serve(service(), HOST)
        with losing(what), on_the_way(many=8) as clients:
            proxy.serve(service(affinity=60), HOST)
            close_departed(proxy)
            nft("flush table inet lossy")
            assert {name_of(client) for client in clients} == {f"{HOST}:9001"}
            assert reached(VIP, 80) == f"{HOST}:9001"


def test_a_port_with_a_client_on_its_way_is_not_reused(start: Start) -> None:
    with endpoints((HOST, 9001)):
        proxy = start(portRange="21000-21000")
        first, second = service("first", "81"), service("second")
        proxy.serve(first, HOST)
        with losing("SYN"), on_the_way(port=81):
            assert remove(proxy, "first") == 0
            assert proxy.serve(second, HOST).unserved
            close_departed(proxy)
            ((key, problem),) = proxy.serve(second, HOST).unserved.items()
            assert (str(key), problem) == ("default/second", "no remaining ports")
        subprocess.run(["conntrack", "-F"], check=True, capture_output=True)  # as after its timeout
        close_departed(proxy)
        assert proxy.serve(second, HOST).unserved == {}
        assert reached(VIP, 80) == f"{HOST}:9001"


def close_departed(proxy: Proxy) -> None:
    """Close departed relays, as the watch does."""
    for family in proxy.backend._families.values():
        family.close_departed()


def remove(proxy: Proxy, name: str) -> int:
    """Delete a Service. Return the number of unserved service ports."""
    node = NODE[Family.IPV4]
    before = plans(node, service(name, "81"), endpoint_slice(name, HOST, ports=["9001"]))
    return len(proxy.backend.sync(changed_update(node, {}, before)).unserved)


@pytest.mark.parametrize("portals", [open_portals, NftPortals])
@pytest.mark.parametrize("leave", ["retire", "close"])
def test_connections_of_an_earlier_mode_continue_without_any_other_rule(
    start: Start, monkeypatch: pytest.MonkeyPatch, portals: object, leave: str
) -> None:
    monkeypatch.setattr(backend_module, "open_portals", portals)
    with endpoints((HOST, 9001)), mode(Family.IPV4) as earlier:
        found = plans(NODE[Family.IPV4], service(), endpoint_slice("web", HOST, ports=["9001"]))
        earlier.sync(full_update(NODE[Family.IPV4], found))
        with connect(VIP, 80) as kept:
            assert name_of(kept) == f"{HOST}:9001"
            proxy = start()
            proxy.serve(service(), HOST)
            nft("delete table ip kproxy")
            getattr(proxy.backend, leave)()
            kept.sendall(b"still here;")
            assert name_of(kept) == "still here"
