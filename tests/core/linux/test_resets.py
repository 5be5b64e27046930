"""Connections to removed endpoints are found in conntrack, and reset: with real packets."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kproxy_core.linux import resets
from kproxy_core.linux.conntrack import connected_to_removed
from kproxy_core.linux.resets import Pair, ResetTable, delete_resets
from kproxy_core.model.address import Family, Protocol, format_address, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.nft.messages import commands_text
from kproxy_core.plan.service_plan import Frontend
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE


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
        vip, other, endpoint = map(
            parse_address, ("10.96.0.1", "10.96.0.2", "10.244.0.1") if family is Family.IPV4
            else ("fd00:96::1", "fd00:96::2", "fd00:244::1"))
        self.vip, self.other = (Frontend(at, Protocol.TCP, 80) for at in (vip, other))
        self.endpoint = Destination(endpoint, 8080)
        self.pair = Pair(self.vip, self.endpoint)
        where, ip = format_address(endpoint), family.ip
        inside.ip(f"addr add {where}/{family.bits} dev lo{'' if family is Family.IPV4 else ' nodad'}",
                  f"route add default dev lo{'' if family is Family.IPV4 else f' src {where}'}")
        inside.nft("\n".join([
            f"add table {ip} lab", f"add chain {ip} lab nat {{ type nat hook output priority -100; }}",
            *(f"add rule {ip} lab nat {ip} daddr {format_address(at)} tcp dport 80 dnat to "
              f"{where if family is Family.IPV4 else f'[{where}]'}:8080" for at in (vip, other)), ""]))
        self.listener = inside.inside(lambda: socket.create_server(
            (where, 8080), family=socket.AF_INET if family is Family.IPV4 else socket.AF_INET6))
        cleanup.callback(self.listener.close)

    def connect(self, to: Frontend | Destination) -> Connection:
        assert to.address is not None
        where = format_address(to.address), to.port
        client = self.inside.inside(lambda: socket.create_connection(where, PATIENCE))
        self._cleanup.callback(client.close)
        server, _ = self.listener.accept()
        self._cleanup.callback(server.close)
        server.settimeout(PATIENCE)
        return Connection(client, server)

    def connected(self, *known: Destination) -> set[tuple[Frontend, Destination]]:
        """Return the connections to the endpoint, of which the search is told if it is *known*."""
        return self.inside.inside(lambda: connected_to_removed(
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


def test_a_table_that_another_process_changed_is_written_anew(lab: Lab) -> None:
    second = Pair(lab.other, lab.endpoint)
    lab.do(lambda: lab.table.write([lab.pair]))
    lab.inside.nft(f"delete table {lab.family.ip} {resets.TABLE}\n")
    lab.do(lambda: lab.table.write([lab.pair, second]))
    assert lab.inside.inside(lab.table.read) == {lab.pair, second}
    lab.do(lambda: lab.table.write([lab.pair]))
    lab.inside.nft(f"flush set {lab.family.ip} {resets.TABLE} removed\n")
    lab.do(lambda: lab.table.write([lab.pair]))
    assert lab.inside.inside(lab.table.read) == {lab.pair}


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


def test_another_process_takes_the_table_over_and_deletes_it(lab: Lab) -> None:
    lab.do(lambda: lab.table.write([lab.pair]))
    next_process = ResetTable(lab.family)
    assert lab.inside.inside(next_process.read) == {lab.pair}
    lab.do(lambda: next_process.write([]))
    assert lab.inside.inside(next_process.read) == frozenset()
    lab.do(lambda: lab.table.write([lab.pair]))
    named = [f"table {lab.family.ip} {resets.TABLE}"]
    assert lab.inside.inside(lambda: delete_resets(lab.family, dry_run=True)) == named
    assert lab.inside.inside(lambda: delete_resets(lab.family, dry_run=False)) == named
    assert lab.inside.inside(lambda: delete_resets(lab.family, dry_run=False)) == []


def test_messages_and_text_make_the_same_table(lab: Lab) -> None:
    table = resets.reset_table(lab.family)
    lab.do(lambda: lab.table.write([lab.pair]))
    by_messages = lab.inside.run("nft", "list", "table", lab.family.ip, table.name)
    lab.inside.nft(commands_text([
        *table.replace(resets.reset_objects(lab.family)),
        *table.add_elements(resets.removed_set(lab.family), [resets.element(lab.pair)])]))
    assert lab.inside.run("nft", "list", "table", lab.family.ip, table.name) == by_messages
