"""Connections to removed endpoints are found in conntrack, and reset: with real packets."""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kproxy_core.linux import resets
from kproxy_core.linux.conntrack import find_pairs
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.resets import Pair, ResetTable, delete_resets
from kproxy_core.model.address import Family, Socket, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.nft.fake import FakeKernel
from kproxy_core.nft.messages import NEWSETELEM, commands_text
from kproxy_core.nft.transaction import RulesetSocket
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE

VIPS = {Family.IPV4: ("10.96.0.1", "10.96.0.2"), Family.IPV6: ("fd00:96::1", "fd00:96::2")}
ENDPOINTS = {Family.IPV4: "10.244.0.1", Family.IPV6: "fd00:244::1"}


def pairs(family: Family) -> tuple[Pair, Pair]:
    """Return two VIPs and their common endpoint."""
    endpoint = Destination(parse_address(ENDPOINTS[family]), 8080)
    one, two = (Pair((parse_address(at), 80), endpoint) for at in VIPS[family])
    return one, two


class Connection(NamedTuple):
    client: socket.socket
    server: socket.socket


class Lab:
    """A node whose rules translate two VIPs to one endpoint, at addresses of the same namespace."""

    def __init__(self, family: Family, inside: Namespace, cleanup: contextlib.ExitStack) -> None:
        self.family = family
        self.inside = inside
        self.table = ResetTable(family)
        self._cleanup = cleanup
        self.pair, second = pairs(family)
        self.vip, self.other, self.endpoint = self.pair.dialled, second.dialled, self.pair.endpoint
        where, ip = format_address(self.endpoint.address), family.ip
        inside.ip(f"addr add {where}/{family.bits} dev lo{'' if family is Family.IPV4 else ' nodad'}",
                  f"route add default dev lo{'' if family is Family.IPV4 else f' src {where}'}")
        inside.nft("\n".join([
            f"add table {ip} lab", f"add chain {ip} lab nat {{ type nat hook output priority -100; }}",
            *(f"add rule {ip} lab nat {ip} daddr {at} tcp dport 80 dnat to "
              f"{where if family is Family.IPV4 else f'[{where}]'}:8080" for at in VIPS[family]), ""]))
        self.listener = inside.inside(lambda: socket.create_server(
            (where, 8080), family=socket.AF_INET if family is Family.IPV4 else socket.AF_INET6))
        cleanup.callback(self.listener.close)

    def connect(self, to: Socket) -> Connection:
        address, port = to
        where = format_address(address), port
        client = self.inside.inside(lambda: socket.create_connection(where, PATIENCE))
        self._cleanup.callback(client.close)
        server, _ = self.listener.accept()
        self._cleanup.callback(server.close)
        server.settimeout(PATIENCE)
        return Connection(client, server)

    def connected(self, *known: Destination) -> set[tuple[Socket, Destination]]:
        """Return the connections to the endpoint, of which the search is told if it is *known*."""
        return self.inside.inside(lambda: find_pairs(
            self.family, lambda _, endpoint: endpoint == self.endpoint, known or None))

    def do(self, act: Callable[[], object]) -> None:
        self.inside.inside(act)


@pytest.fixture(params=Family, ids=lambda family: family.label)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with namespace() as inside, contextlib.ExitStack() as cleanup:
        yield Lab(request.param, inside, cleanup)


def is_alive(connection: Connection) -> bool:
    connection.client.send(b"?")
    connection.server.send(connection.server.recv(1))
    return connection.client.recv(1) == b"?"


def is_reset(sock: socket.socket) -> bool:
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    return True


def test_connections_through_a_frontend_are_reset_by_the_next_byte_and_others_are_not(lab: Lab) -> None:
    one, two, other = map(lab.connect, (lab.vip, lab.vip, lab.other))
    direct = lab.connect(lab.endpoint)
    lab.do(lambda: lab.table.write([lab.pair]))
    one.client.send(b"?")
    assert is_reset(one.client)
    two.server.send(b"!")
    assert two.client.recv(1) == b"!", "an answer under way arrives"
    assert is_reset(two.client)
    assert is_reset(two.server)
    assert is_alive(other)
    assert is_alive(direct)
    lab.do(lambda: lab.table.write([]))
    assert is_alive(lab.connect(lab.vip)), "the endpoint has returned"
    assert "kproxy" not in lab.inside.run("nft", "list", "ruleset")


def test_an_endpoint_that_ends_its_connections_is_heard(lab: Lab) -> None:
    closing, killed = lab.connect(lab.vip), lab.connect(lab.vip)
    lab.do(lambda: lab.table.write([lab.pair]))
    closing.server.close()
    assert closing.client.recv(1) == b""
    killed.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    killed.server.close()
    with pytest.raises(ConnectionResetError):
        killed.client.recv(1)


def test_conntrack_tells_the_connections_to_a_removed_endpoint(lab: Lab) -> None:
    assert lab.connected() == set()
    connections = [lab.connect(at) for at in (lab.vip, lab.other, lab.endpoint)]
    assert len(connections) == 3
    both = {(lab.vip, lab.endpoint), (lab.other, lab.endpoint)}
    assert lab.connected() == both
    assert lab.connected(lab.endpoint) == both
    neighbour = lab.endpoint._replace(port=8081)
    assert lab.connected(neighbour) <= both
    many = [lab.endpoint, *(lab.endpoint._replace(port=port) for port in range(9000, 9020))]
    assert lab.connected(*many) == both


def test_a_connection_that_has_ended_is_not_found(lab: Lab) -> None:
    ended = lab.connect(lab.vip)
    ended.client.close()
    assert ended.server.recv(1) == b""
    ended.server.close()
    assert lab.connected(lab.endpoint) == set()


@pytest.mark.usefixtures("nf_tables")
@pytest.mark.parametrize("family", Family)
def test_a_table_that_another_process_changed_is_written_anew(family: Family) -> None:
    first, second = pairs(family)
    written, named = ResetTable(family), resets.reset_table(family)
    written.write([first])
    with RulesetSocket.open() as other:
        other.run([named.delete()])
        written.write([first, second])
        assert written.read() == {first, second}
        written.write([first])
        other.run([named.empty(resets.removed_set(family))])
        written.write([first])
        assert written.read() == {first}


@pytest.mark.parametrize("damage", [
    "add element {} removed { * }",
    "add chain {} x { type filter hook forward priority 0; }; add rule {} x meta mark 7 jump { drop; }",
    "add counter {} x; insert rule {} prerouting counter name x drop",
    "flush chain {} prerouting; flush chain {} output; flush chain {} reset-client; delete set {} removed; "
    "add set {} removed { type mark; }; add element {} removed { 7 }",
])  # fmt: skip
def test_whatever_another_process_puts_into_the_table_is_removed(lab: Lab, damage: str) -> None:
    def listed() -> list[str]:
        return sorted(lab.inside.run("nft", "-s", "list", "table", *name.split()).splitlines())

    name = f"{lab.family.ip} {resets.TABLE}"
    lab.do(lambda: lab.table.write([lab.pair]))
    before = listed()
    lab.inside.nft(damage.replace("{}", name))
    assert listed() != before
    lab.do(lambda: lab.table.write([lab.pair]))
    assert listed() == before


@pytest.mark.usefixtures("nf_tables")
@pytest.mark.parametrize("family", Family)
def test_another_process_takes_the_table_over_and_deletes_it(family: Family) -> None:
    pair, _ = pairs(family)
    table, next_process = ResetTable(family), ResetTable(family)
    table.write([pair])
    assert next_process.read() == {pair}
    next_process.write([])
    assert next_process.read() == frozenset()
    table.write([pair])
    named = [f"table {family.ip} {resets.TABLE}"]
    assert delete_resets(family, dry_run=True) == named
    assert delete_resets(family, dry_run=False) == named
    assert delete_resets(family, dry_run=False) == []


@pytest.mark.parametrize("family", Family)
def test_a_write_that_the_kernel_refuses_is_made_up_for_by_the_next(family: Family) -> None:
    first, second = pairs(family)
    with FakeKernel() as kernel:
        table = ResetTable(family)
        table.write([first])
        kernel.refuse(errno.EBUSY, kind=NEWSETELEM, times=3)  # The change, its completion, the replacement.
        with pytest.raises(HostError):
            table.write([first, second])
        assert table.read() == {first}
        table.write([first, second])
        assert table.read() == {first, second}


def test_messages_and_text_make_the_same_table(lab: Lab) -> None:
    table = resets.reset_table(lab.family)
    lab.do(lambda: lab.table.write([lab.pair]))
    by_messages = lab.inside.run("nft", "list", "table", lab.family.ip, table.name)
    lab.inside.nft(commands_text([
        *table.replace(resets.reset_objects(lab.family)),
        *table.add_elements(resets.removed_set(lab.family), [resets.element(lab.pair)])]))
    assert lab.inside.run("nft", "list", "table", lab.family.ip, table.name) == by_messages
