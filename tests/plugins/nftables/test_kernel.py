"""The backend with the real nf_tables of an empty network namespace."""

import re
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_core.contract.errors import SyncFailed, TrustLost
from kproxy_core.contract.values import BackendSettings, Scope, SyncReport, Update
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.node import NodeView
from kproxy_core.model.service import ServicePortKey
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.elements import Found, PlainElement
from kproxy_core.nft.messages import Command, transaction
from kproxy_core.nft.objects import Chain, Table
from kproxy_core.nft.rules import NF_ACCEPT, NFT_GOTO, Verdict, jump
from kproxy_core.nft.transaction import RulesetSocket, TransactionRefused, difference, element_changes
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables import names, skeleton
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.cleanup import cleanup
from kproxy_nftables.kernel import Kernel

from .test_applied import some_plans, without_index

in_linux = pytest.mark.usefixtures("netns")
"""For tests with the program nft, or with more elements than are worth the time twice."""
in_any_kernel = pytest.mark.usefixtures("nf_tables")

BOTH = BackendSettings(families=tuple(Family))
Plans = dict[ServicePortKey, ServicePlan]

ACCEPT = Verdict(NF_ACCEPT)
_VIPS = "add table ip kproxy; add map ip kproxy vips { typeof ip daddr : verdict; }"

NODES = {
    Family.IPV4: node_view(
        "node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1", service_cidrs="10.96.0.0/12"
    ),
    Family.IPV6: node_view(
        "node1", family=Family.IPV6, pods="fd00:1::/64", node_port_addresses="2001:db8::1"
    ),
}


@pytest.fixture
def backend() -> Iterator[NftablesBackend]:
    made = NftablesBackend(BOTH)
    yield made
    made.close()


def resync(backend: NftablesBackend, wanted: Plans, node: NodeView = NODES[Family.IPV4]) -> SyncReport:
    return backend.sync(Update(node.family, Scope.RESYNC, node, dict(wanted), wanted))


def change(
    backend: NftablesBackend,
    changed: dict[ServicePortKey, ServicePlan | None],
    node: NodeView = NODES[Family.IPV4],
) -> SyncReport:
    return backend.sync(Update(node.family, Scope.CHANGED, node, changed, {}))


def nft(command: str) -> str:
    return subprocess.run(["nft", *command.split()], check=True, capture_output=True, text=True).stdout


def contents(family: Family = Family.IPV4) -> list[tuple[str, bytes, Found]]:
    kernel = Kernel()
    try:
        return [
            (container, key, value)
            for container in names.ELEMENT_CONTAINERS
            for key, value in kernel.elements(family, container).items()
        ]
    finally:
        kernel.close()


def containers(family: Family = Family.IPV4) -> set[str]:
    """Return the names of the table's sets and maps."""
    kernel = Kernel()
    try:
        held = kernel.held(family, ())
    finally:
        kernel.close()
    return set(held.containers) if held is not None else set()


def rich(family: Family = Family.IPV4) -> Plans:
    """Return the plans of Services of every kind."""
    if family is Family.IPV6:
        vip, pod, external, ranges = "fd00:96::", "fd00:1::", "2001:db8:1::", "2001:db8::/32"
    else:
        vip, pod, external, ranges = "10.96.0.", "10.244.1.", "203.0.113.", "192.0.2.0/24"
    kinds: list[dict[str, Any]] = [
        {},
        {"affinity": 600},
        {"external_ips": f"{external}3", "internal_local": True},
        {"load_balancer_ips": f"{external}4", "source_ranges": ranges, "affinity": 5},
        {"load_balancer_ips": f"{external}5", "external_local": True, "affinity": 7},
    ]
    here = [endpoint(f"{pod}{n}", "node1" if n % 2 else "node2") for n in range(1, 6)]
    found: Plans = {}
    for number, kind in enumerate(kinds, start=1):
        ports = (f"80@3000{number}", f"sctp:90/SCTP@3000{number}")
        svc = service(f"web{number}", *ports, ip=f"{vip}{number}", **kind)
        piece = endpoint_slice(f"web{number}", *here[: number + 1], ports=("8080", "sctp:9000/SCTP"))
        found.update(plans(NODES[family], svc, piece))
    return found


def hooks() -> set[str]:
    """Return the hooks of the table's filter chains."""
    return set(re.findall(r"type filter hook (\w+)", nft("list table ip kproxy")))


@in_linux
def test_packets_meet_chains_that_record_clients_only_while_a_service_has_affinity(
    backend: NftablesBackend,
) -> None:
    piece = endpoint_slice("web", endpoint("10.244.1.1"))
    plain, sticky = (plans(NODES[Family.IPV4], service("web", affinity=n), piece) for n in (0, 60))
    resync(backend, plain)
    assert hooks() == {"forward", "output"}
    change(backend, dict(sticky))
    assert hooks() == {"forward", "output", "input", "postrouting"}
    change(backend, dict(plain))
    resync(backend, plain)
    assert hooks() == {"forward", "output"}


@in_any_kernel
@pytest.mark.parametrize("family", Family)
def test_a_restart_over_a_correct_table_writes_nothing(backend: NftablesBackend, family: Family) -> None:
    assert resync(backend, rich(family), NODES[family]).operations > 50
    again = NftablesBackend(BOTH)
    assert resync(again, rich(family), NODES[family]).operations == 0
    again.close()


@in_any_kernel
@pytest.mark.parametrize("family", Family)
def test_a_restart_over_long_maps_does_not_list_them(
    backend: NftablesBackend, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_nftables.family.LONG_DUMP", 1)
    listed: list[str] = []
    real = Kernel.elements

    def elements(kernel: Kernel, family: Family, container: str) -> dict[bytes, Found]:
        listed.append(container)
        return real(kernel, family, container)

    resync(backend, rich(family), NODES[family])
    monkeypatch.setattr(Kernel, "elements", elements)
    for _ in range(2):
        again = NftablesBackend(BOTH)
        assert resync(again, rich(family), NODES[family]).operations == 0
        again.close()
    with Kernel() as kernel:
        if kernel.counts(family):  # Older kernels do not tell them.
            assert not set(listed).intersection(names.ELEMENT_CONTAINERS)
    changed = dict.fromkeys(rich(family))
    assert change(backend, changed, NODES[family]).operations > 50


@in_linux
@pytest.mark.parametrize("damage", [
    "delete element ip kproxy vips { 10.96.0.1 . tcp . 80 }",
    "add element ip kproxy vips { 10.96.0.99 . tcp . 80 : drop }",
    "delete element ip kproxy vips { 10.96.0.1 . tcp . 80 };"
    " add element ip kproxy vips { 10.96.0.1 . tcp . 80 : drop }",
    "delete element ip kproxy tcp-vip-endpoints { 10.96.0.1 . 80 . 0 };"
    " add element ip kproxy tcp-vip-endpoints { 10.96.0.1 . 80 . 0 : 10.244.1.9 . 8080 }",
    "delete element ip kproxy vips { 10.96.0.1 . tcp . 80 };"
    " add element ip kproxy vips { 10.96.0.99 . tcp . 80 : drop }",
    "flush set ip kproxy cluster-ips",
], ids=["missing", "unwanted", "verdict", "endpoint", "another", "flushed"])  # fmt: skip
def test_a_full_sync_over_long_maps_repairs_them(
    backend: NftablesBackend, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kproxy_nftables.family.LONG_DUMP", 1)
    resync(backend, rich())
    before = sorted(map(repr, contents()))
    nft(damage)
    assert sorted(map(repr, contents())) != before
    assert resync(backend, rich()).operations > 0
    assert sorted(map(repr, contents())) == before


@in_any_kernel
@pytest.mark.parametrize("family", Family)
def test_a_second_full_sync_commits_nothing(backend: NftablesBackend, family: Family) -> None:
    node, kernel = NODES[family], Kernel()
    resync(backend, rich(family), node)
    before = kernel.generation()
    resync(backend, rich(family), node)
    assert kernel.generation() == before
    change(backend, dict.fromkeys(rich(family)), node)
    change(backend, dict(rich(family)), node)
    resync(backend, rich(family), node)
    before = kernel.generation()
    resync(backend, rich(family), node)
    assert kernel.generation() == before
    kernel.close()


@in_linux
def test_rules_that_another_process_changed_during_the_write_are_written_again(
    backend: NftablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Kernel.fill

    def write_and_be_disturbed(kernel: Kernel, *arguments: Any) -> int:
        written = write(kernel, *arguments)
        nft("flush chain ip kproxy nat-output")
        return written

    with monkeypatch.context() as disturbed:
        disturbed.setattr(Kernel, "fill", write_and_be_disturbed)
        resync(backend, rich())
    assert "jump services" not in nft("list chain ip kproxy nat-output")
    resync(backend, rich())
    assert "jump services" in nft("list chain ip kproxy nat-output")


@in_linux
@pytest.mark.parametrize("family", Family)
def test_the_rendered_text_equals_the_programmed_table(
    backend: NftablesBackend, family: Family, tmp_path: Path
) -> None:
    wanted = rich(family)
    text = backend.render(Update(family, Scope.RESYNC, NODES[family], wanted, wanted))
    resync(backend, wanted, NODES[family])
    programmed = nft(f"list table {family.ip} kproxy")
    nft(f"delete table {family.ip} kproxy")
    (tmp_path / "rules.nft").write_text(text)
    nft(f"-f {tmp_path}/rules.nft")
    assert normal(nft(f"list table {family.ip} kproxy")) == normal(programmed)


def normal(listing: str) -> list[str]:
    """Return the sorted lines of a listing, because sets are listed in hash order."""
    flat = listing.replace(",\n", "\n").replace("{ ", "{\n").replace(" }", "\n}").replace(", ", "\n")
    return sorted(line.strip() for line in flat.splitlines())


@in_linux
def test_incremental_changes_reach_the_kernel(backend: NftablesBackend) -> None:
    resync(backend, {})
    change(backend, dict(rich()))
    full = NftablesBackend(BOTH)
    assert resync(full, rich()).operations == 0
    full.close()
    change(backend, dict.fromkeys(rich()))
    assert [e for e in contents() if e[0] != names.NODE_IPS] == []
    listing = nft("list table ip kproxy")
    assert "affinity-" not in listing
    assert "ranges-" not in listing


@settings(suppress_health_check=list(HealthCheck))
@given(first=some_plans(), second=some_plans(), third=some_plans())
def test_any_path_ends_in_the_kernel_of_a_full_sync(
    nf_tables: None, first: Plans, second: Plans, third: Plans
) -> None:
    cleanup(dry_run=False)
    path, fresh = NftablesBackend(BOTH), NftablesBackend(BOTH)
    try:
        resync(path, first)
        held = dict(first)
        for state in (second, third):
            change(path, dict.fromkeys(held) | state)
            held = state
        walked = contents()
        owned = containers()
        cleanup(dry_run=False)
        resync(fresh, third)
        assert without_index(walked) == without_index(contents())
        assert owned == containers()
    finally:
        path.close()
        fresh.close()


DAMAGE = [
    ("delete element ip kproxy vips { 10.96.0.1 . tcp . 80 }", "element deleted"),
    ("flush map ip kproxy tcp-vip-endpoints", "element deleted"),
    ("flush chain ip kproxy services", "rule deleted"),
    ("flush table ip kproxy", "rule deleted"),
    ("delete table ip kproxy", "table deleted"),
    ("flush ruleset", "table deleted"),
    ("add rule ip kproxy services drop", "rule added"),
    ("add element ip kproxy cluster-ips { 192.0.2.77 }", "element added"),
    ("flush set ip kproxy service-cidrs", "element deleted"),
    ("add chain ip kproxy filter-forward { policy drop ; }", "chain added"),
    ("add table ip kproxy { flags dormant ; }", "table added"),
    ("flush chain ip kproxy nat-output; add rule ip kproxy nat-output accept", "rule added"),
    ("flush chain ip kproxy nat-output; add rule ip kproxy nat-output jump record", "rule added"),
    ("flush chain ip kproxy nat-postrouting; delete chain ip kproxy nat-postrouting;"
     " add chain ip kproxy nat-postrouting", "chain deleted"),
    ("flush chain ip kproxy masquerading; delete set ip kproxy hairpins;"
     " add set ip kproxy hairpins { type inet_service ; }", "set deleted"),
]


@in_linux
@pytest.mark.parametrize(("command", "what"), DAMAGE, ids=[d[0] for d in DAMAGE])
def test_foreign_damage_is_noticed_named_and_repaired(
    backend: NftablesBackend, command: str, what: str
) -> None:
    resync(backend, rich())
    healthy = normal(nft("list table ip kproxy"))
    reported: list[tuple[Family, str]] = []
    noticed = threading.Event()

    def damaged(family: Family, what: str) -> None:
        reported.append((family, what))
        noticed.set()

    assert backend.watch(damaged)
    nft(command)
    assert noticed.wait(120)
    assert reported[0][0] is Family.IPV4
    assert what in reported[0][1]
    assert " by nft[" in reported[0][1]
    resync(backend, rich())
    assert normal(nft("list table ip kproxy")) == healthy


@in_linux
def test_own_and_unrelated_changes_are_no_damage(backend: NftablesBackend) -> None:
    resync(backend, rich())
    reported: list[str] = []
    noticed = threading.Event()

    def damaged(family: Family, what: str) -> None:
        reported.append(what)
        noticed.set()

    backend.watch(damaged)
    resync(backend, {})
    change(backend, dict(rich()))
    nft("add table ip other")
    nft("add table inet kproxy")
    nft("add table ip6 kproxy")  # ours in the other family: the only change to be reported
    assert noticed.wait(120)
    assert len(reported) == 1
    assert reported[0].startswith("table added")


@in_linux
def test_changes_before_the_watch_count_as_damage(backend: NftablesBackend) -> None:
    resync(backend, rich())
    nft("flush ruleset")
    reported: list[Family] = []
    backend.watch(lambda family, what: reported.append(family))
    assert reported == list(Family)


@in_linux
def test_an_unexpected_kernel_state_is_reported_and_not_acknowledged(backend: NftablesBackend) -> None:
    resync(backend, rich())
    nft("flush map ip kproxy tcp-vip-endpoints")
    with pytest.raises(TrustLost):
        change(backend, dict.fromkeys(rich()))
    assert resync(backend, {}).operations > 0
    assert [e for e in contents() if e[0] != names.NODE_IPS] == []


@in_any_kernel
def test_a_change_before_any_resync_writes_every_plan(backend: NftablesBackend) -> None:
    node = NODES[Family.IPV4]
    backend.sync(Update(node.family, Scope.CHANGED, node, {}, rich()))
    assert resync(backend, rich()).operations == 0


@in_linux
def test_a_rule_that_another_process_replaced_is_foreseen_and_written_again(
    backend: NftablesBackend,
) -> None:
    update = Update(Family.IPV4, Scope.RESYNC, NODES[Family.IPV4], rich(), rich())
    resync(backend, rich())
    assert backend.preview(update).operations == 0
    chain, rule = "ip kproxy nat-output", "jump services"
    (handle,) = re.findall(rf"{rule} # handle (\d+)", nft(f"-a list chain {chain}"))
    nft(f"replace rule {chain} handle {handle} accept")
    foreseen = backend.preview(update)
    assert f"add rule {chain} {rule}\n" in foreseen.transaction
    assert resync(backend, rich()).operations == foreseen.operations > 0
    assert rule in nft(f"list chain {chain}")


@in_linux
def test_a_table_of_another_layout_is_replaced(backend: NftablesBackend) -> None:
    nft("add table ip kproxy")
    nft("add map ip kproxy vips { type ipv4_addr : verdict ; }")
    resync(backend, rich())
    verdict = Verdict(NFT_GOTO, "tcp-cluster-2")
    assert (names.VIPS, b"\x0a\x60\x00\x01\x06\0\0\0\x00\x50\0\0", verdict) in contents()


@in_linux
def test_leftover_chains_and_sets_in_our_table_are_swept(backend: NftablesBackend) -> None:
    resync(backend, rich())
    for command in (
        "add chain ip kproxy tcp-cluster-99",
        "add chain ip kproxy old",
        "add rule ip kproxy old jump tcp-cluster-99",
        "add set ip kproxy older { type ipv4_addr ; }",
        "add map ip kproxy oldest { type inet_service : verdict ; }",
        "add element ip kproxy oldest { 80 : goto old }",
    ):
        nft(command)
    resync(backend, rich())
    listing = nft("list table ip kproxy")
    assert "tcp-cluster-99" not in listing
    assert "old" not in listing


class ReluctantKernel(Kernel):
    """Reports chains busy for a while, as kernels before 6.2 do."""

    busy = False

    def run(self, commands: Sequence[Command]) -> None:
        if self.busy and any(command.text.startswith("delete chain") for command in commands):
            raise SyncFailed("nf_tables refuses 'delete chain': Device or resource busy")
        super().run(commands)


@in_linux
def test_busy_objects_are_deleted_at_the_next_change_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy_nftables.backend.Kernel", ReluctantKernel)
    reluctant = NftablesBackend(BOTH)
    node, piece = NODES[Family.IPV4], endpoint_slice("web", endpoint("10.244.1.5"))

    def failures() -> list[tuple[str, float]]:
        return [(m.labels["ip_family"], m.value) for m in reluctant.measure()]

    try:
        resync(reluctant, plans(node, service("web", affinity=60), piece))
        monkeypatch.setattr(ReluctantKernel, "busy", True)
        change(reluctant, dict(plans(node, service("web"), piece)))
        assert "pin-" in nft("list table ip kproxy")
        assert failures() == [("IPv4", 1), ("IPv6", 0)]
        monkeypatch.setattr(ReluctantKernel, "busy", False)
        change(reluctant, dict(plans(node, service("web"), endpoint_slice("web", endpoint("10.244.1.6")))))
        assert "pin-" not in nft("list table ip kproxy")
        assert failures() == [("IPv4", 1), ("IPv6", 0)]
    finally:
        reluctant.close()


@in_linux
def test_node_facts_change_without_a_resync(backend: NftablesBackend) -> None:
    resync(backend, rich())
    moved = node_view(
        "node1", pods="10.244.9.0/24", node_port_addresses="192.0.2.1 192.0.2.9", service_cidrs="10.96.0.0/16"
    )
    change(backend, {}, moved)
    listing = nft("list table ip kproxy")
    assert "10.244.9.0/24" in listing
    assert "10.244.1.0/24" not in listing
    assert "192.0.2.9" in nft("list set ip kproxy node-ips")
    assert "10.96.0.0/16" in nft("list set ip kproxy service-cidrs")


@in_linux
def test_a_write_too_large_for_one_transaction_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    nft(_VIPS)
    old: list[PlainElement] = [(names.VIPS, n.to_bytes(4, "big"), names.DROP) for n in range(5000)]
    new: list[PlainElement] = [(names.VIPS, n.to_bytes(4, "big"), ACCEPT) for n in range(2500, 7500)]
    kernel.write(Family.IPV4, [], old)
    parts = list(element_changes(skeleton.table(Family.IPV4), old, new, limit=100_000))
    assert len(parts) > 1
    assert all(len(transaction(part)[0]) <= 100_000 for part in parts)
    monkeypatch.setattr(NetlinkSocket, "send_limit", 100_000)
    kernel.write(Family.IPV4, old, new)
    assert kernel.elements(Family.IPV4, names.VIPS) == {key: value for _, key, value in new}
    kernel.close()


@in_any_kernel
def test_a_large_write_adds_frontends_after_endpoints_and_deletes_them_before() -> None:
    endpoints = names.VIP_ENDPOINTS[Protocol.TCP]
    elements: list[PlainElement] = [
        (names.CLUSTER_IPS, b"ip11", None), (names.VIPS, b"ip11tcp.port1", names.DROP),
        (endpoints, b"ip11port0001", b"ip22port"), (endpoints, b"ip11port0002", b"ip22port")]

    def containers(deletes: list[PlainElement], adds: list[PlainElement]) -> list[set[str]]:
        return [{name for name in (names.CLUSTER_IPS, names.VIPS, endpoints)
                 if f"{name}\0".encode() in transaction(part)[0]}
                for part in element_changes(
                    skeleton.table(Family.IPV4), deletes, adds, limit=1 << 20, most=2, ranks=names.RANKS)]

    assert containers([], elements) == [{endpoints}, {names.VIPS, names.CLUSTER_IPS}]
    assert containers(elements, []) == [{names.VIPS, names.CLUSTER_IPS}, {endpoints}]


@in_linux
def test_a_first_fill_that_the_kernel_refuses_ends_there(netns: None) -> None:
    first: list[PlainElement] = [(names.VIPS, n.to_bytes(4, "big"), names.DROP) for n in range(5000)]
    last: list[PlainElement] = [(names.VIPS, n.to_bytes(4, "big"), names.DROP) for n in range(5000, 5010)]
    unknown: list[PlainElement] = [(names.NODE_IPS, b"ip11", None)]
    with Kernel() as kernel:
        nft(_VIPS)
        assert kernel.fill(Family.IPV4, [first, [], last], []) == 5010
        assert kernel.elements(Family.IPV4, names.VIPS).keys() == {key for _, key, _ in first + last}
        nft("flush map ip kproxy vips")
        with pytest.raises(SyncFailed, match="No such file"):
            kernel.fill(Family.IPV4, [first, unknown, last], [])
        assert kernel.elements(Family.IPV4, names.VIPS).keys() == {key for _, key, _ in first}


@in_linux
@pytest.mark.parametrize("attempt", range(3))
def test_a_map_that_the_kernel_is_still_resizing_is_read_completely(attempt: int) -> None:
    """Soon after many additions, a dump lacks about a tenth of them."""
    kernel = Kernel()
    nft(_VIPS)
    written = {(n * 3 + attempt).to_bytes(4, "big"): ACCEPT for n in range(100_000)}
    kernel.write(Family.IPV4, [], [(names.VIPS, key, value) for key, value in written.items()])
    assert kernel.elements(Family.IPV4, names.VIPS) == written
    kernel.close()


@in_any_kernel
def test_a_missing_table_has_no_elements() -> None:
    kernel = Kernel()
    assert contents() == []
    assert kernel.held(Family.IPV4, ()) is None
    kernel.close()


@in_linux
def test_a_refused_rule_is_named_with_the_kernels_reason() -> None:
    rule = (jump("nowhere"),)
    table = Table(Family.IPV4, names.TABLE)
    refused = "nf_tables refuses 'add rule ip kproxy lost jump nowhere': No such file or directory"
    with Kernel() as kernel, pytest.raises(SyncFailed, match=refused):
        kernel.run([table.create(), *table.write([Chain("lost", (rule,))])])
    assert nft("list tables") == ""


@in_linux
def test_cleanup_deletes_our_tables_and_kube_proxys_only(backend: NftablesBackend) -> None:
    resync(backend, rich())
    for table in ("ip kube-proxy", "ip6 kube-proxy", "inet kproxy", "ip foreign"):
        nft(f"add table {table}")
    expected = ("table ip kproxy", "table ip kube-proxy", "table ip6 kube-proxy")
    assert cleanup(dry_run=True).removed == expected
    assert "kube-proxy" in nft("list tables")
    assert cleanup(dry_run=False).removed == expected
    assert nft("list tables").split("\n")[:-1] == ["table inet kproxy", "table ip foreign"]
    assert cleanup(dry_run=False).removed == ()


@in_any_kernel
@pytest.mark.parametrize("count", [100, 3000])
def test_a_change_writes_as_much_at_any_number_of_services(
    backend: NftablesBackend, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in elements, not in seconds."""
    wanted: Plans = {}
    for number in range(count):
        svc = service(f"web{number}", ip=f"10.96.{number >> 8}.{number & 255}")
        wanted.update(
            plans(NODES[Family.IPV4], svc, endpoint_slice(f"web{number}", "10.244.2.1", "10.244.2.2"))
        )
    resync(backend, wanted)
    asked: list[tuple[int, int, int]] = []
    real: Callable[..., None] = Kernel.write

    def counted(
        self: Kernel, family: Family, deletes: list[PlainElement], adds: list[PlainElement],
        commands: Sequence[Command] = (),
    ) -> None:  # fmt: skip
        asked.append((len(commands), len(deletes), len(adds)))
        real(self, family, deletes, adds, commands)

    monkeypatch.setattr(Kernel, "write", counted)
    monkeypatch.setattr(NetlinkSocket, "dump", None)  # listing anything would fail
    changed = plans(
        NODES[Family.IPV4],
        service("web7", ip="10.96.0.7"),
        endpoint_slice("web7", "10.244.2.1", "10.244.2.9"),
    )
    change(backend, dict(changed))
    assert asked[0] == (0, 1, 1)


@in_linux
def test_the_owner_of_a_foreign_table_is_named() -> None:
    kernel, table = Kernel(), Table(Family.IPV4, names.TABLE)
    command = ["nft", "--interactive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        owner.stdin.write(f"add table ip {names.TABLE} {{ flags owner; }}\n")
        owner.stdin.flush()
        while not kernel.has_table(Family.IPV4, names.TABLE):
            assert owner.poll() is None
        owned = f"table ip {names.TABLE} is owned by another process, nft[{owner.pid}]"
        with pytest.raises(SyncFailed, match=f"Operation not permitted.*{re.escape(owned)}"):
            kernel.run(list(table.write([Chain("mine")])))
        owner.stdin.close()
    kernel.run([table.create(), *table.write([Chain("mine")])])
    kernel.close()


@in_linux
def test_a_table_of_another_owner_is_refused_though_nothing_is_to_be_written(netns: None) -> None:
    node = node_view("node1", pods="10.244.1.0/24")
    table, layout = skeleton.table(Family.IPV4, owned=True), skeleton.layout(node, (), {})
    backend = NftablesBackend(BackendSettings(families=(Family.IPV4,), own_tables=True))
    assert backend.begin()
    with RulesetSocket.open() as other:  # The kernel tells sockets apart, not processes.
        other.run(difference(table, layout, None))
        with pytest.raises(SyncFailed, match=r"^table ip kproxy is owned by another process"):
            resync(backend, {}, node)
    assert resync(backend, {}, node).operations == 0
    with RulesetSocket.open() as other, pytest.raises(TransactionRefused, match="Operation not permitted"):
        other.run([table.delete()])
    backend.close()


@in_any_kernel
def test_objects_with_names_that_nft_cannot_write_are_deleted_and_never_written_as_text(
    backend: NftablesBackend,
) -> None:
    node, hostile = NODES[Family.IPV4], "x { }; flush ruleset #"
    update = Update(Family.IPV4, Scope.RESYNC, node, {}, {})
    resync(backend, {})
    with Kernel() as kernel:
        kernel.run(list(Table(Family.IPV4, names.TABLE).write([Chain(hostile)])))
        assert hostile not in backend.preview(update).transaction
        resync(backend, {})
        assert (held := kernel.held(Family.IPV4, ())) is not None
        assert hostile not in held.chains


@in_linux
def test_packets_to_node_ports_that_no_relay_takes_are_counted(backend: NftablesBackend) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    of = service("web", "80@30080", "sctp:90/SCTP@30090", ip="10.96.0.1 fd00:96::1")
    for family, to in ((Family.IPV4, "127.0.0.1"), (Family.IPV6, "::1")):
        node = replace(NODES[family], relays_node_ports=True)
        resync(backend, plans(node, of), NODES[family])
        assert "not-relayed" not in nft(f"list table {family.ip} kproxy")
        change(backend, {}, node)
        assert resync(backend, plans(node, of), node).operations == 0
        for port in (30090, 30090, 30080, 9):
            with socket.socket(family.af, socket.SOCK_RAW, Protocol.SCTP) as raw:
                raw.sendto(struct.pack("!HHII", 40000, port, 0, 0), (to, 0))
    counted = {m.labels["ip_family"]: (m.labels.get("protocol"), m.value) for m in backend.measure()
               if m.name == "kubeproxy_nftables_localhost_nodeport_rejected_packets_total"}
    assert counted == {"IPv4": ("SCTP", 2), "IPv6": ("SCTP", 2)}
