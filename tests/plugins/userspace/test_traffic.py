"""Real clients and endpoints, with the backend between them."""

import os
import random
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import pytest

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, plans, service
from kproxy_conformance.network.dialing import wait_until
from kproxy_conformance.network.patience import patience
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.relay.orders import Serve
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_userspace import backend as backend_module
from kproxy_userspace import family as family_module
from kproxy_userspace.cleanup import cleanup
from kproxy_userspace.kernel.portals import NftPortals, open_portals
from tests.patience import PATIENCE

from .endpoints import connect, datagram, endpoints, name_of, reached
from .proxies import NODE, ONE, TWO, VIP, A, B, Start

WEB = ServicePortKey("default", "web", "", Protocol.TCP)

pytestmark = pytest.mark.usefixtures("node")


def test_cluster_ip_and_node_port_reach_every_endpoint(start: Start) -> None:
    with endpoints(ONE, TWO):
        start().serve(service("web", "80@30080"), "127.0.0.1", "127.0.0.2")
        assert {reached(VIP, 80) for _ in range(20)} == {A, B}
        assert {reached("192.0.2.1", 30080) for _ in range(20)} == {A, B}


def test_the_same_through_nftables(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "open_portals", NftPortals)
    with endpoints(ONE):
        proxy = start()
        proxy.serve(service("web", "80@30080"), "127.0.0.1")
        assert reached(VIP, 80) == reached("192.0.2.1", 30080) == A
        proxy.serve(service("web", "81"), "127.0.0.1")
        assert reached(VIP, 81) == A
        assert [family.is_intact() for family in proxy.backend._families.values()] == [True]


def test_ipv6(start: Start) -> None:
    with endpoints(("fd00:1::1", 9001)):
        start().serve(service(ip="fd00:96::1"), "fd00:1::1", family=Family.IPV6)
        assert reached("fd00:96::1", 80) == "fd00:1::1:9001"
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
            start().serve(service("dns", "53/UDP", ip="fd00:96::2"), "fd00:1::1", ports="9001/UDP",
                          family=Family.IPV6)
            assert datagram(client, b"?", "fd00:96::2", 53) == "fd00:1::1:9001"


@pytest.mark.parametrize("size", [1, 16 << 10, 5_000_000])
def test_all_bytes_arrive_after_the_client_half_closes(start: Start, size: int) -> None:
    with endpoints(ONE):
        start().serve(service(), "127.0.0.1")
        sent = os.urandom(size)
        with connect(VIP, 80) as client:
            assert name_of(client) == A

            def send() -> None:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            got = bytearray()
            while part := client.recv(1 << 16):
                got += part
            sender.join()
        assert bytes(got) == sent


def test_a_client_that_reads_nothing_stalls_no_other(start: Start) -> None:
    with endpoints(ONE):
        start(workers=1).serve(service(), "127.0.0.1")
        with connect(VIP, 80) as deaf:
            deaf.settimeout(1)
            with pytest.raises(TimeoutError):  # The endpoint echoes everything, until all buffers are full.
                deaf.sendall(bytes(1 << 28))
            assert reached(VIP, 80) == A


def test_an_endpoint_that_does_not_answer_stalls_no_client(start: Start) -> None:
    with endpoints(ONE):
        proxy = start(workers=1)
        proxy.serve(service("dead", "81", ip="10.96.0.2"), "203.0.113.9")
        proxy.serve(service(), "127.0.0.1")
        with connect("10.96.0.2", 81) as waiting:
            assert reached(VIP, 80) == A
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):  # its attempts are still under way
                waiting.recv(1)
            waiting.settimeout(PATIENCE)
            with pytest.raises(ConnectionResetError):
                waiting.recv(1)


def test_without_endpoints_clients_are_refused(start: Start) -> None:
    proxy = start()
    proxy.serve(service())
    with pytest.raises(ConnectionRefusedError):
        connect(VIP, 80)
    with endpoints(ONE):
        proxy.serve(service(), "127.0.0.1")
        assert reached(VIP, 80) == A
        proxy.serve(service())
        with pytest.raises(ConnectionRefusedError):
            connect(VIP, 80)


def test_an_endpoint_that_does_not_answer_costs_a_retry_only(start: Start) -> None:
    with endpoints(ONE):
        start().serve(service(affinity=60), "127.0.0.1", "127.0.0.2", "203.0.113.9")
        assert {reached(VIP, 80) for _ in range(10)} == {A}


def test_affinity_holds_over_connections_and_workers(start: Start) -> None:
    with endpoints(ONE, TWO):
        start().serve(service(affinity=60), "127.0.0.1", "127.0.0.2")
        for source in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            assert len({reached(VIP, 80, source) for _ in range(10)}) == 1


def test_udp_flows_are_kept_until_idle(start: Start) -> None:
    with endpoints(ONE) as (one,), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        proxy = start(udpIdleTimeout=f"{patience()}s")
        proxy.serve(service("dns", "53/UDP"), "127.0.0.1", ports="9001/UDP")
        for size in (0, 1, 9000):
            assert datagram(client, bytes(size), VIP, 53) == A
        assert len(one.flows) == 1

        def flows() -> float:
            name = "kproxy_userspace_udp_flows"
            (value,) = [found.value for found in proxy.backend.measure() if found.name == name]
            return value

        assert flows() == 1
        assert wait_until(lambda: not flows(), PATIENCE)
        assert datagram(client, b"again", VIP, 53) == A
        assert len(one.flows) == 2


def test_udp_clients_move_when_their_endpoint_is_removed(start: Start) -> None:
    of = service("dns", "53/UDP")
    with endpoints(ONE, TWO), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        proxy = start(udpIdleTimeout="1h")
        proxy.serve(of, "127.0.0.1", ports="9001/UDP")
        assert datagram(client, b"1", VIP, 53) == A
        proxy.serve(of, "127.0.0.2", ports="9001/UDP")
        assert datagram(client, b"2", VIP, 53) == B


@pytest.mark.parametrize(
    ("options", "goes_on"),
    [({}, True), ({"removedEndpoints": "close"}, False),
     ({"removedEndpoints": "drain", "drainTimeout": "100ms"}, False)],
)  # fmt: skip
def test_connections_to_a_removed_endpoint(
    start: Start, options: dict[str, object], goes_on: bool
) -> None:
    with endpoints(ONE, TWO):
        proxy = start(**options)
        proxy.serve(service(), "127.0.0.1")
        with connect(VIP, 80) as client:
            assert name_of(client) == A
            proxy.serve(service(), "127.0.0.2")
            assert {reached(VIP, 80) for _ in range(10)} == {B}
            if goes_on:
                client.sendall(b"still here;")
                assert name_of(client) == "still here"
            else:
                with pytest.raises(ConnectionResetError):
                    client.recv(1)


@pytest.mark.parametrize("others", [["127.0.0.2"], []], ids=["replaced", "none left"])
def test_connections_to_removed_endpoints_are_reset_on_request(start: Start, others: list[str]) -> None:
    first, second = Destination.parse(A), Destination.parse(B)
    with endpoints(ONE, TWO):
        proxy = start()
        proxy.serve(service(), "127.0.0.1")
        with connect(VIP, 80) as client:
            assert name_of(client) == A
            proxy.serve(service(), *others)

            def reset(where: Destination) -> int:
                return proxy.backend.reset_connections(
                    Family.IPV4, lambda of, endpoint: (of, endpoint) == (WEB, where))

            assert reset(second) == 0
            client.sendall(b"still here;")
            assert name_of(client) == "still here"
            assert reset(first) == 1
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            assert reset(first) == 0


def test_no_connection_fails_while_endpoints_change(start: Start) -> None:
    with endpoints(ONE, TWO):
        proxy = start()
        proxy.serve(service(), "127.0.0.1", "127.0.0.2")
        failures: list[str] = []
        done = threading.Event()
        count = [0]

        def load() -> None:
            while not done.is_set():
                try:
                    reached(VIP, 80)
                    count[0] += 1
                except OSError as error:
                    failures.append(str(error))

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(100):
            made = count[0]
            proxy.serve(service(), *(["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.2"])[number % 3])
            wait_until(lambda made=made: count[0] > made or failures, PATIENCE, interval=0.001)  # type: ignore[misc]
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert count[0] >= 100


def test_a_killed_worker_is_reported_and_replaced(start: Start) -> None:
    with endpoints(ONE):
        proxy = start()
        proxy.serve(service(), "127.0.0.1")
        noticed = threading.Event()

        def damaged(family: Family, what: str) -> None:
            proxy.damages.append(what)
            noticed.set()

        assert proxy.backend.watch(damaged)
        for worker in proxy.workers():
            worker.process.kill()
            worker.process.wait()
        assert noticed.wait(PATIENCE)
        proxy.serve(service(), "127.0.0.1")
        assert reached(VIP, 80) == A


@pytest.mark.parametrize(("portals", "damage"), [
    (open_portals, "flush ruleset"), (open_portals, "flush table ip nat"),
    (open_portals, "flush chain ip nat OUTPUT"), (open_portals, "flush chain ip nat KUBE-PORTALS-HOST"),
    (open_portals, "add table ip nat { flags dormant; }"),
    (NftPortals, "flush ruleset"), (NftPortals, "flush chain ip kproxy-userspace nat-output"),
    (NftPortals, "flush map ip kproxy-userspace vips"),
    (NftPortals, "add table ip kproxy-userspace { flags dormant; }"),
    (NftPortals, "flush map ip kproxy-userspace vips; add element ip kproxy-userspace vips { * : 9 }"),
    (NftPortals, "add chain ip kproxy-userspace x { type filter hook output priority 0; policy drop; }; "
                 "add rule ip kproxy-userspace x meta mark 7 jump { drop; }"),
    (NftPortals, "flush ruleset; add table ip kproxy-userspace; "
                 "add map ip kproxy-userspace vips { type mark : verdict; }"),
])  # fmt: skip
def test_foreign_changes_of_portals_are_noticed_at_once_and_repaired(
    start: Start, monkeypatch: pytest.MonkeyPatch, portals: object, damage: str
) -> None:
    monkeypatch.setattr(backend_module, "open_portals", portals)
    with endpoints(ONE):
        proxy = start(syncPeriod="1h")  # only a notification makes it compare the portals
        proxy.serve(service(), "127.0.0.1")
        noticed = threading.Event()

        def damaged(family: Family, what: str) -> None:
            if family is Family.IPV4:
                proxy.damages.append(what)
                noticed.set()

        assert proxy.backend.watch(damaged)
        subprocess.run(["nft", damage], check=True)
        assert noticed.wait(PATIENCE)
        assert re.search(r"by nft\[\d+\]", proxy.damages[0])
        proxy.serve(service(), "127.0.0.1")
        assert reached(VIP, 80) == A


def test_own_changes_and_foreign_rules_are_not_damage(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoints(ONE):
        proxy = start(syncPeriod="1h")
        proxy.serve(service(), "127.0.0.1")
        family, compared = proxy.backend._families[Family.IPV4], threading.Event()
        is_intact = family.is_intact

        def compare() -> bool:
            found = is_intact()
            compared.set()
            return found

        monkeypatch.setattr(family, "is_intact", compare)
        reports: SimpleQueue[str] = SimpleQueue()
        assert proxy.backend.watch(lambda family, what: reports.put(what))
        for port in range(81, 85):
            proxy.serve(service("web", str(port)), "127.0.0.1")
        for command in ("-N MINE", "-A MINE -j RETURN", "-I OUTPUT -j MINE", "-D OUTPUT -j MINE", "-F MINE"):
            subprocess.run(["iptables", "-w", "-t", "nat", *command.split()], check=True)
        assert compared.wait(PATIENCE)  # It would find the damage that follows.
        subprocess.run(["nft", "flush chain ip nat KUBE-PORTALS-HOST"], check=True)
        assert "nft[" in reports.get(timeout=PATIENCE)


def test_workers_hold_no_capability_but_the_one_for_low_ports(start: Start) -> None:
    with endpoints(ONE):
        proxy = start(listen="192.0.2.1")
        proxy.serve(service("web", "80"), "127.0.0.1")
        assert reached("192.0.2.1", 80) == A
        for worker in proxy.workers():
            lines = Path(f"/proc/{worker.process.pid}/status").read_text().splitlines()
            fields = dict(line.split(":\t") for line in lines if line.startswith(("Cap", "NoNew")))
            assert {int(fields[name], 16) for name in ("CapEff", "CapPrm")} == {1 << 10}
            assert (int(fields["CapInh"], 16), int(fields["CapAmb"], 16), fields["NoNewPrivs"]) == (0, 0, "1")


def test_relays_listen_in_the_range(start: Start) -> None:
    with endpoints(ONE):
        start(portRange="21000-21009").serve(service("web", "80@30080"), "127.0.0.1")
        saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
        ports = {int(line.rpartition(" ")[2]) for line in saved.splitlines() if "--to-ports" in line}
        assert ports
        assert ports <= set(range(21000, 21010))


@pytest.mark.parametrize("portals", [open_portals, NftPortals])
@pytest.mark.parametrize("bind", ["192.0.2.2", "2001:db8::1"])
def test_relays_listen_at_the_bind_address(
    start: Start, monkeypatch: pytest.MonkeyPatch, portals: object, bind: str
) -> None:
    monkeypatch.setattr(backend_module, "open_portals", portals)
    v6 = ":" in bind
    vip, host = ("fd00:96::1", "fd00:1::1") if v6 else (VIP, "127.0.0.1")
    with endpoints((host, 9001)):
        proxy = start(bindAddress=bind)
        proxy.serve(service("web", "80@30080", ip=vip), host, family=Family.IPV6 if v6 else Family.IPV4)
        local, loopback = ("2001:db8::1", "::1") if v6 else ("192.0.2.1", "127.0.0.1")
        for place in ((vip, 80), (local, 30080), (loopback, 30080)):
            assert reached(*place) == f"{host}:9001"
        assert [family.is_intact() for family in proxy.backend._families.values()] == [True]
        listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
        assert sum(line.split()[3].strip("[]").startswith(bind) for line in listening.splitlines()) == 2


def test_with_listen_ports_are_bound_and_no_rule_is_written(start: Start) -> None:
    with endpoints(ONE):
        start(listen="127.0.0.9").serve(service("web", "8080@30080"), "127.0.0.1")
        assert reached("127.0.0.9", 8080) == reached("127.0.0.9", 30080) == A
        rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
        assert "redirect" not in rules.stdout


def test_with_listen_changed_ports_are_released(start: Start) -> None:
    with endpoints(ONE):
        proxy = start(listen="127.0.0.9")
        for node_port, other in ((30080, 30081), (30081, 30080), (30080, 30081)):
            proxy.serve(service("web", f"8080@{node_port}"), "127.0.0.1")
            assert reached("127.0.0.9", 8080) == reached("127.0.0.9", node_port) == A
            with pytest.raises(ConnectionRefusedError):
                connect("127.0.0.9", other)


def test_close_leaves_no_redirection(start: Start) -> None:
    with endpoints(ONE):
        proxy = start()
        proxy.serve(service("web", "80@30080"), "127.0.0.1")
        pids = [worker.process.pid for worker in proxy.workers()]
        with connect(VIP, 80) as client:
            assert name_of(client) == A
            proxy.backend.close()
            with pytest.raises(ConnectionResetError):  # not an orderly end
                client.recv(1)
        rules = subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True)
        assert "KUBE" not in rules.stdout
        left = cleanup(dry_run=True).removed  # for connections of other modes
        assert cleanup(dry_run=False, own_only=True).removed == left
        assert cleanup(dry_run=True).removed == ()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_portals_of_a_process_that_was_killed_are_taken_over(start: Start) -> None:
    with endpoints(ONE):
        start().serve(service("web", "80@30080"), "127.0.0.1")
        second = start()
        second.serve(service("web", "80@30080"), "127.0.0.1")  # on other ports, in the same chains
        slices = endpoint_slice("web", "127.0.0.1", ports=["9001"])
        found = plans(NODE[Family.IPV4], service("web", "80@30080"), slices)
        assert second.backend.sync(full_update(NODE[Family.IPV4], found)).operations == 0
        assert reached(VIP, 80) == A


@pytest.mark.parametrize("is_retry", [False, True])
@pytest.mark.parametrize("program", ["iptables", "nft"])
def test_clients_never_reach_another_service_at_a_port_of_a_killed_process(
    start: Start, program: str, is_retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == "nft":
        monkeypatch.setattr(backend_module, "open_portals", NftPortals)
    monkeypatch.setattr(random, "randrange", lambda _: 0)
    options = {"workers": 1, "portRange": "40000-40001", "udpIdleTimeout": "1h"}
    wanted = {
        vip: plans(NODE[Family.IPV4], service(name, "80", "53/UDP", ip=vip),
                   endpoint_slice(name, host, ports=["9001", "9001/UDP"]))
        for name, vip, host in (("a", "10.96.0.1", "127.0.0.1"), ("b", "10.96.0.2", "127.0.0.2"))
    }
    a, b = wanted.values()
    with endpoints(ONE, TWO), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        killed = start(**options).backend
        killed.sync(full_update(NODE[Family.IPV4], {**a, **b}))
        assert datagram(client, b"1", VIP, 53) == A
        killed._workers.close()
        for family in killed._families.values():
            family.close()
            family._withdrawn = True

        next_one = start(**options).backend
        serve, answered = next_one._workers.serve, list[str]()

        def serve_and_dial(changes: Mapping[int, Serve | None]) -> dict[int, str]:
            failed = serve(changes)
            if changes:  # The relays listen, and no portal is written.
                with suppress(OSError), socket.create_connection((VIP, 80), 0.3) as early:
                    answered.append(name_of(early))
            return failed

        monkeypatch.setattr(next_one._workers, "serve", serve_and_dial)
        update = full_update(NODE[Family.IPV4], {**b, **a})
        if is_retry:
            with monkeypatch.context() as failing:
                failing.setattr(family_module, "delete_flows", Mock(side_effect=HostError("no memory")))
                with pytest.raises(SyncFailed):
                    next_one.sync(update)
        next_one.sync(update)
        assert answered == []
        assert reached(VIP, 80) == A
        assert datagram(client, b"2", VIP, 53) == A


def test_a_relay_that_cannot_listen_is_reported_and_retried(start: Start) -> None:
    with endpoints(ONE):
        proxy = start(workers=1)
        proxy.serve(service(), "127.0.0.1")
        (pid,) = [worker.process.pid for worker in proxy.workers()]
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limit[1]))
        more = service("more", "81", ip="10.96.0.2")
        ((key, problem),) = proxy.serve(more, "127.0.0.1").unserved.items()
        assert str(key) == "default/more"
        assert "Too many open files" in problem
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        assert reached(VIP, 80) == A
        assert proxy.serve(more, "127.0.0.1").unserved == {}
        assert reached("10.96.0.2", 81) == A


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_node_port_moves_between_services_within_one_sync(
    start: Start, names: tuple[str, str]
) -> None:
    node = NODE[Family.IPV4]
    slices = {name: endpoint_slice(name, host, ports=["9001"])
              for name, host in zip(names, ("127.0.0.1", "127.0.0.2"), strict=True)}  # fmt: skip
    first, second = (plans(node, service(name, "80@30080"), slices[name]) for name in names)
    with endpoints(ONE, TWO):
        proxy = start()
        proxy.backend.sync(full_update(node, first))
        assert reached("192.0.2.1", 30080) == A
        report = proxy.backend.sync(changed_update(node, second, sorted({**first, **second})))
        assert report.unserved == {}
        assert reached("192.0.2.1", 30080) == B


def test_relayed_traffic_is_counted(start: Start) -> None:
    with endpoints(ONE):
        proxy = start(udpIdleTimeout="1h")

        def measured(name: str, to: str = "") -> float:
            (value,) = [
                found.value for found in proxy.backend.measure()
                if found.name == f"kproxy_userspace_{name}" and found.labels.get("to", "") == to
            ]
            return value

        proxy.serve(service(), "127.0.0.1", "127.0.0.3")
        with connect(VIP, 80) as client:
            assert name_of(client) == A
            client.sendall(b"12345;")
            assert name_of(client) == "12345"
            assert measured("connections") == 1
        while reached(VIP, 80) and not measured("dial_failures_total"):
            pass
        proxy.serve(service("dns", "53/UDP", ip="10.96.0.2"), "127.0.0.1", ports="9001/UDP")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            assert datagram(asking, b"?", "10.96.0.2", 53) == A
        assert measured("accepted_connections_total") >= 2
        assert measured("bytes_total", "endpoint") == 6
        assert measured("bytes_total", "client") >= len(f"{A};12345;{A};")
        assert measured("udp_flows") == measured("datagrams_total", "endpoint") == 1
        deadline = time.monotonic() + PATIENCE
        while not measured("datagrams_total", "client") and time.monotonic() < deadline:
            time.sleep(0.01)  # the answer arrives before it is counted
        assert measured("datagrams_total", "client") == 1
        before = measured("accepted_connections_total")
        for worker in proxy.workers():
            worker.process.kill()
            worker.process.wait()
        proxy.damages.append("workers")
        proxy.serve(service(), "127.0.0.1")
        assert measured("accepted_connections_total") == before  # totals are kept, gauges are not
        assert measured("connections") == measured("udp_flows") == 0


def test_cleanup_removes_everything_once(start: Start) -> None:
    before = subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout
    start().serve(service("web", "80@30080"))
    found = cleanup(dry_run=True)
    assert sum(": chain KUBE-" in line for line in found.removed) == 5
    assert sum(": rule in " in line for line in found.removed) == 5
    assert cleanup(dry_run=False) == found
    assert cleanup(dry_run=False).removed == ()
    after = subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout
    rules = [line for line in after.splitlines() if line.startswith(("-A", ":KUBE"))]
    assert rules == [line for line in before.splitlines() if line.startswith(("-A", ":KUBE"))]
