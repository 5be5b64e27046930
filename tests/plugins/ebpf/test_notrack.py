"""Option ``notrack``: connections of the node's own sockets that leave no trace in connection tracking."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.namespaces import Namespace
from tests.core.processes import kproxy
from tests.plugins.ebpf.node import NODE, NODE6, POD, POD6, PORT, REMOTE, REMOTE6, Node, echo, node, until

TCP = socket.SOCK_STREAM
FAR, FAR6, NEAR, NEAR6 = "10.96.0.10", "fd00:96::10", "10.96.0.20", "fd00:96::20"
"""Services with one endpoint: elsewhere, and the pod on the node."""
OWN, OWN6 = "10.96.0.30", "fd00:96::30"
"""Services whose endpoint is the node itself."""
REFUSING = "10.96.0.40"
MARK = 1 << 12
TABLES = {"ip kproxy-notrack", "ip6 kproxy-notrack"}


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node")) as made:
        services = {FAR: REMOTE[0], FAR6: REMOTE6[0], NEAR: POD, NEAR6: POD6, OWN: NODE, OWN6: NODE6}
        for number, (address, endpoint) in enumerate({**services, REFUSING: "203.0.113.2"}.items()):
            made.serve(f"service-{number}", address, [endpoint])
        with echo(made.host, (NODE, NODE6)), made.proxy({"notrack": True}):
            yield made


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Node]:
    """A node for a proxy of the test's own."""
    with node(tmp_path) as made:
        made.serve("web", FAR, REMOTE)
        yield made


def dial(where: Node, at: Namespace, address: str, *, mark: int = 0) -> socket.socket:
    """Return a connection to port 80 of *address* over which data has passed both ways."""
    client = where.sockets(at).open(socket.AF_INET6 if ":" in address else socket.AF_INET, TCP)
    if mark:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
    client.connect((address, 80))
    exchange(client)
    return client


def exchange(client: socket.socket) -> None:
    assert client.recv(100).endswith(b"\n")
    client.sendall(b"heard?")
    assert client.recv(100) == b"heard?"


def mark_of(client: socket.socket) -> int:
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)


def entries(where: Node, client: socket.socket) -> list[str]:
    """Return the connections of the client's port to an endpoint that the node tracks."""
    return entries_of(where, client.getsockname()[1])


def entries_of(where: Node, port: int) -> list[str]:
    listed = [where.host.run("conntrack", "-L", "-f", family, "-p", "tcp") for family in ("ipv4", "ipv6")]
    lines = "".join(listed).splitlines()
    return [line for line in lines if f"port={port} " in line and "port=8080 " in line]


def tables(where: Node) -> set[str]:
    listed = where.host.run("nft", "list", "tables").split("table ")
    return {line.strip() for line in listed} & TABLES


@pytest.mark.parametrize("address", [FAR, FAR6, NEAR, NEAR6])
def test_connections_of_the_node_are_not_tracked_from_first_to_last_packet(
    untracked: Node, address: str
) -> None:
    with dial(untracked, untracked.host, address) as client:
        assert entries(untracked, client) == []
        assert mark_of(client) == MARK
        port = client.getsockname()[1]
    server = untracked.pod if address in (NEAR, NEAR6) else untracked.elsewhere
    until(lambda: not server.run("ss", "-tanH", "dport", "=", f":{port}"))
    assert entries_of(untracked, port) == []


def test_without_the_option_they_are_tracked(where: Node) -> None:
    with where.proxy(), dial(where, where.host, FAR) as client:
        assert len(entries(where, client)) == 1
        assert mark_of(client) == 0
        assert tables(where) == set()


@pytest.mark.parametrize("address", [FAR, FAR6])
def test_connections_of_pods_are_tracked_though_their_sockets_can_be_marked(
    untracked: Node, address: str
) -> None:
    """The mark is cleared where packets leave the pod's namespace."""
    for mark in (0, MARK):
        with dial(untracked, untracked.pod, address, mark=mark) as client:
            assert len(entries(untracked, client)) == 1
            assert mark_of(client) == mark


def test_a_mark_of_the_application_is_kept(untracked: Node) -> None:
    with dial(untracked, untracked.host, FAR, mark=7) as client:
        assert mark_of(client) == 7
        assert len(entries(untracked, client)) == 1


def test_connections_that_the_rules_translate_are_tracked(untracked: Node) -> None:
    with untracked.sockets(untracked.host, translated=False).open(socket.AF_INET, TCP) as client:
        client.connect((FAR, 80))
        exchange(client)
        assert len(entries(untracked, client)) == 1


@pytest.mark.parametrize("address", [OWN, OWN6])
def test_connections_within_the_node_are_tracked_both_ways(untracked: Node, address: str) -> None:
    with dial(untracked, untracked.host, address) as client:
        (entry,) = entries(untracked, client)
        assert "[ASSURED]" in entry


def test_a_socket_that_dials_something_else_later_is_tracked(untracked: Node) -> None:
    with untracked.sockets(untracked.host).open(socket.AF_INET, TCP) as client:
        client.settimeout(None)  # After a refusal, Linux lets a blocking socket dial again at once.
        with pytest.raises(ConnectionRefusedError):
            client.connect((REFUSING, 80))
        assert mark_of(client) == MARK
        client.connect((REMOTE[0], PORT))
        exchange(client)
        assert mark_of(client) == 0
        assert len(entries(untracked, client)) == 1


def test_replies_are_untracked_for_a_firewall(untracked: Node) -> None:
    """A firewall that accepts ``ct state established`` only would drop them."""
    client = untracked.sockets(untracked.host).open(socket.AF_INET, TCP)
    client.bind(("", 0))
    # Tracked segments of others may arrive late.
    reply = f"tcp sport 8080 tcp dport {client.getsockname()[1]}"
    untracked.host.nft(f"""
        table inet firewall {{
            chain input {{
                type filter hook input priority 0;
                {reply} ct state untracked counter
                {reply} ct state != untracked counter
            }}
        }}
    """)
    try:
        with client:
            client.connect((FAR, 80))
            exchange(client)
            # A socket in TIME_WAIT has no mark, so the last segments of a closed connection are tracked.
            seen = untracked.host.run("nft", "list", "table", "inet", "firewall")
        first, other = (line.split("counter packets ")[1].split()[0] for line in seen.splitlines()
                        if "counter" in line)  # fmt: skip
        assert int(first) >= 3
        assert other == "0"
    finally:
        untracked.host.nft("delete table inet firewall")


@pytest.mark.parametrize("damage", [
    "delete table ip kproxy-notrack", "flush chain ip6 kproxy-notrack prerouting", "flush ruleset",
    "insert rule ip kproxy-notrack output accept", "add table ip kproxy-notrack { flags dormant; }",
])  # fmt: skip
def test_damage_is_repaired(untracked: Node, damage: str) -> None:
    def rules() -> str:
        return "".join(untracked.host.run("nft", "list", "table", *table.split()) for table in sorted(TABLES))

    before = rules()
    untracked.host.nft(damage)
    until(lambda: tables(untracked) == TABLES and rules() == before)
    with dial(untracked, untracked.host, FAR) as client:
        assert entries(untracked, client) == []


def test_an_open_connection_is_tracked_from_a_switch_to_another_mode_on(where: Node) -> None:
    with where.proxy({"notrack": True}), dial(where, where.host, FAR) as client:
        assert tables(where) == TABLES
        assert kproxy("switch", "nftables", node=where.host).returncode == 0
        until(lambda: tables(where) == set())
        client.sendall(b"again")
        assert client.recv(100) == b"again"
        assert len(entries(where, client)) == 1


def test_render_shows_the_tables_and_nft_accepts_them(untracked: Node) -> None:
    arguments = [f"--config={untracked.config}", f"--manifests={untracked.manifests}"]
    rules = kproxy("render", *arguments, "--hostname-override=here", node=untracked.host).stdout
    checked = kproxy("render", "--check", *arguments, "--hostname-override=here", node=untracked.host)
    assert checked.returncode == 0, checked.stderr
    for family in ("ip", "ip6"):
        table = f"add rule {family} kproxy-notrack"
        assert f'{table} output meta l4proto tcp oif != "lo" meta mark 0x00001000 notrack\n' in rules
        assert f'{table} prerouting meta l4proto tcp iif != "lo" socket mark 0x00001000 notrack\n' in rules


def test_a_plan_lists_the_tables_that_a_start_would_create_or_delete(where: Node) -> None:
    def planned() -> set[str]:
        objects = f"--config={where.config}", f"--manifests={where.manifests}", "--hostname-override=here"
        done = kproxy("plan", "-v", "-o", "json", *objects, node=where.host)
        commands = "".join(each.get("transaction", "") for each in json.loads(done.stdout)["kernel"])
        return {line for line in commands.splitlines() if "kproxy-notrack" in line and " chain " not in line}

    with where.proxy({"notrack": True}):
        assert planned() == set()
    where.host.nft("flush chain ip kproxy-notrack output; delete table ip6 kproxy-notrack")
    rules = [line for line in planned() if " mark 0x00001000 notrack" in line]
    assert sorted(line.rpartition(" meta l4proto tcp ")[0] for line in rules) == [
        "add rule ip kproxy-notrack output", "add rule ip6 kproxy-notrack output",
        "add rule ip6 kproxy-notrack prerouting",
    ]
    assert planned() - {*rules} == {"add table ip6 kproxy-notrack"}
    where.config.write_text(where.config.read_text().replace('"notrack": true', '"notrack": false'))
    assert planned() == {"delete table ip kproxy-notrack"}


def test_a_clean_up_removes_the_tables_and_a_dry_run_names_them(where: Node) -> None:
    with where.proxy({"notrack": True}):
        pass
    arguments = ["--cleanup", f"--config={where.config}"]
    said = kproxy(*arguments, "--dry-run", node=where.host).stdout
    assert all(f"table {table} would be removed" in said for table in TABLES)
    assert tables(where) == TABLES
    assert kproxy(*arguments, node=where.host).returncode == 0
    assert tables(where) == set()


def test_a_start_without_the_option_removes_the_tables(where: Node) -> None:
    with where.proxy({"notrack": True}):
        assert tables(where) == TABLES
    with where.proxy():
        assert tables(where) == set()
