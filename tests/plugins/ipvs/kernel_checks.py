"""The backend on a kernel with IPVS. `test_kernel` runs these tests in a guest of their own."""

import itertools
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, plans, service
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.contract.values import Preview
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family, Protocol, parse_address, parse_cidr
from kproxy_core.model.service import Destination
from kproxy_ipvs import names, skeleton
from kproxy_ipvs.applied import FIRST
from kproxy_ipvs.backend import IpvsBackend
from kproxy_ipvs.batch import DeleteServer, PutDestination, PutServer
from kproxy_ipvs.cleanup import cleanup
from kproxy_ipvs.kernel import connections, device, servers, sets
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.retire import retire
from kproxy_ipvs.settings import SCHEDULERS
from kproxy_ipvs.wanted import Scheduling, ServerKey
from kproxy_xtables.rules import ChainKey
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import find_variant
from tests.patience import PATIENCE
from tests.plugins.explained import agrees, decided, questions_about
from tests.plugins.ipvs.rig import NODES, WEB, Plans, answers, change, everything, full, web, weight


@pytest.mark.parametrize("family", list(Family))
def test_restart_writes_nothing(family: Family, make: Callable[..., IpvsBackend]) -> None:
    wanted = everything(family)
    assert full(make(), wanted) > 0
    assert full(make(), wanted) == 0


@pytest.mark.parametrize("family", list(Family))
def test_a_preview_counts_the_operations_of_the_next_sync(
    family: Family, make: Callable[..., IpvsBackend]
) -> None:
    backend, every = make(), everything(family)
    backend.sync(full_update(NODES[family], {}))
    fewer = dict(list(every.items())[2:])
    for wanted in (every, fewer, every):
        update = full_update(NODES[family], wanted)
        seen = backend.preview(update)
        assert seen.operations == backend.sync(update).operations > 0
        assert seen.transaction
        assert backend.preview(update) == Preview(0, "")


@pytest.mark.parametrize("family", list(Family))
def test_the_objects_in_the_kernel_decide_as_the_plans_say(
    family: Family, make: Callable[..., IpvsBackend]
) -> None:
    backend, wanted = make(), everything(family)
    full(backend, wanted)
    asked = questions_about(wanted, NODES[family])
    sides = backend.explain(asked, live=True)
    assert [(q.packet, side) for q, side in zip(asked, sides, strict=True) if not agrees(q, side)] == []
    served = {frontend for plan in wanted.values() for frontend in plan.frontends() if frontend.address}
    assert served <= set(backend.frontends(family))


@pytest.mark.parametrize("family", list(Family))
def test_an_endpoint_that_another_program_deletes_is_a_difference(
    family: Family, make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    backend, wanted = make(), everything(family)
    full(backend, wanted)
    asked = [question for question in questions_about(wanted, NODES[family]) if decided(question).choices][:1]
    packet = asked[0].packet
    key = ServerKey(family, 0, packet.destination, packet.protocol, packet.port)
    kernel.write([DeleteServer(key)])
    assert not agrees(asked[0], backend.explain(asked, live=True)[0])


@pytest.mark.parametrize("family", list(Family))
def test_proc_and_netlink_agree(
    family: Family, make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    full(make(), everything(family))
    listed = kernel.count(family)
    assert len(listed) > 10
    assert {key: items for key, (_, items) in listed.items()} == {
        key: kernel.destinations(key) for key in listed
    }


@pytest.mark.parametrize("family", list(Family))
def test_damage_is_repaired(
    family: Family, make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    backend = make()
    wanted = everything(family)
    full(backend, wanted)
    before = state(family, kernel)
    program = "iptables" if family is Family.IPV4 else "ip6tables"
    key = next(iter(kernel.read(family)))
    kernel.write([DeleteServer(key)])
    some_set = "KUBE-CLUSTER-IP" if family is Family.IPV4 else "KUBE-6-CLUSTER-IP"
    for command in (
        [program, "-t", "nat", "-F", "KUBE-SERVICES"], [program, "-t", "mangle", "-F", "PREROUTING"],
        ["ipset", "flush", some_set], ["ip", "link", "delete", "kube-ipvs0"],
    ):  # fmt: skip
        subprocess.run(command, check=True)
    assert state(family, kernel) != before
    assert full(backend, wanted) > 0
    assert state(family, kernel) == before
    assert full(backend, wanted) == 0


STEPS: list[tuple[object, str]] = [
    (sets, "write"), (VirtualServers, "write"), (device, "bind"), (device, "unbind")
]


@pytest.mark.parametrize(("place", "name"), STEPS, ids=[name for _, name in STEPS])
def test_sync_after_a_failed_kernel_call_completes_the_change(
    place: object, name: str, make: Callable[..., IpvsBackend], kernel: VirtualServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node, one = NODES[Family.IPV4], web("10.244.2.1")
    others = {key: plan for key, plan in everything(Family.IPV4).items() if key.name != "web-1"}
    gone = [key for key in others if key.name == "web-2"]
    wanted = one | {key: plan for key, plan in others.items() if key not in gone}
    full(make(), wanted)
    expected = state(Family.IPV4, kernel)
    backend = make()
    full(backend, {key: others[key] for key in gone})
    update = changed_update(node, wanted, [*wanted, *gone])
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise HostError("refused")

        patch.setattr(place, name, fail)
        with pytest.raises(SyncFailed, match="refused"):
            backend.sync(update)
    assert backend.sync(update).operations > 0
    assert state(Family.IPV4, kernel) == expected
    assert backend.sync(update).operations == 0


def test_change_without_the_device_fails_and_the_next_sync_repairs_it(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    both = web("10.244.2.1") | everything(Family.IPV4)
    full(make(), both)
    expected = state(Family.IPV4, kernel)
    cleanup(dry_run=False)
    backend = make()
    full(backend, web("10.244.2.1"))
    subprocess.run(["ip", "link", "delete", "kube-ipvs0"], check=True)
    update = changed_update(NODES[Family.IPV4], both, both)
    with pytest.raises(SyncFailed, match="kube-ipvs0 does not exist"):
        backend.sync(update)
    assert backend.sync(update).operations > 0
    assert state(Family.IPV4, kernel) == expected


def rules_of(family: Family) -> dict[ChainKey, list[str]]:
    """Return all chains with their rules."""
    return Tables(family, find_variant()).chains()


def state(family: Family, kernel: VirtualServers) -> tuple[object, ...]:
    """Return all objects of the mode in the kernel."""
    held = rules_of(family)
    ours = {key: held.get(key) for key in skeleton.skeleton(NODES[family])}
    jumps = [jump.spec in held[jump.table, jump.chain] for jump in skeleton.JUMPS]
    return kernel.read(family), sets.read(family), device.read(family)[0], ours, jumps


def test_one_endpoint_costs_the_same_beside_many_services(make: Callable[..., IpvsBackend]) -> None:
    backend = make()
    node = NODES[Family.IPV4]
    many: Plans = {}
    for number in range(60):
        svc = service(f"web-{number}", ip=f"10.96.1.{number}")
        many |= plans(node, svc, endpoint_slice(str(svc.name), "10.244.2.1", "10.244.2.2"))
    full(backend, many | web("10.244.2.1"))
    assert change(backend, web("10.244.2.1", "10.244.2.2")) == 1
    assert change(backend, web("10.244.2.2")) == 1


MANY_PODS = 1_250


def many(family: Family, number: int, **options: object) -> Plans:
    """Return a Service with *number* endpoints."""
    prefix, vip = ("10.244", "10.96.0.9") if family is Family.IPV4 else ("fd00:2::", "fd00::9")
    pods = [f"{prefix}.{2 + at // 250}.{at % 250 + 1}" if family is Family.IPV4 else f"{prefix}{at + 1:x}"
            for at in range(number)]
    large = service("large", ip=vip, **options)  # type: ignore[arg-type]
    return plans(NODES[family], large, endpoint_slice("large", *pods))


def in_parts(backend: IpvsBackend, wanted: Plans) -> int:
    """Sync *wanted* until nothing is left. Return in how many syncs."""
    node = NODES[next(iter(wanted.values())).family]
    for number in itertools.count(1):
        if not (left := backend.sync(changed_update(node, wanted, wanted)).unfinished):
            return number
        assert left == wanted.keys()
    raise AssertionError


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("affinity", [0, 600])
def test_many_endpoints_are_written_in_parts(
    family: Family, affinity: int, make: Callable[..., IpvsBackend], kernel: VirtualServers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kproxy_ipvs.family._PART_SECONDS", 0.0)
    backend, node = make(), NODES[family]
    large = many(family, MANY_PODS, affinity=affinity)
    backend.sync(full_update(node, {}))
    assert backend.sync(changed_update(node, large, large)).unfinished == large.keys()
    (key,) = kernel.read(family)
    assert 0 < len(kernel.destinations(key)) <= FIRST
    # The changes of others do not wait, and a restart goes on where the last process ended.
    others = {each: plan for each, plan in everything(family).items() if plan.port == 81}
    report = backend.sync(changed_update(node, others, others))
    assert report.unfinished == large.keys()
    assert report.operations > 0
    again = make()
    assert again.sync(full_update(node, large | others)).unfinished == large.keys()
    assert FIRST < len(kernel.destinations(key)) <= 2 * FIRST
    assert in_parts(again, large) > 5
    assert len(kernel.destinations(key)) == MANY_PODS
    assert again.sync(full_update(node, large | others)).operations == 0
    # What another program deletes is repaired in parts, too.
    kernel.write([DeleteServer(key)])
    assert again.sync(full_update(node, large | others)).unfinished == large.keys()
    assert again.sync(changed_update(node, others, list(large))).unfinished == frozenset()
    assert key not in kernel.read(family)
    in_parts(again, large)
    in_parts(again, many(family, 3, affinity=affinity))
    deadline = time.monotonic() + PATIENCE
    while len(kernel.destinations(key)) > 3:  # A thread deletes them.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(kernel.destinations(key)) == 3


def test_a_draining_endpoint_of_many_that_returns_is_kept(
    make: Callable[..., IpvsBackend], kernel: VirtualServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    large = many(Family.IPV4, MANY_PODS)
    full(backend, large)
    in_parts(backend, large)
    state_of = backend._families[Family.IPV4]
    reading, returned = threading.Event(), threading.Event()
    find = servers.find_drained

    def slow(*given: object) -> object:
        found = find(*given)  # type: ignore[arg-type]
        if threading.current_thread().name == "ipvs-draining":
            reading.set()
            assert returned.wait(PATIENCE)
        return found

    monkeypatch.setattr(servers, "find_drained", slow)
    in_parts(backend, many(Family.IPV4, MANY_PODS - 5))
    assert reading.wait(PATIENCE)
    in_parts(backend, large)
    returned.set()
    state_of.close()
    (key,) = kernel.read(Family.IPV4)
    assert [item.weight for item in kernel.destinations(key)] == [1] * MANY_PODS


def test_deleted_service_leaves_no_objects(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    backend = make()
    one = web("10.244.2.1")
    full(backend, one)
    empty = state(Family.IPV4, kernel)
    other = everything(Family.IPV4)
    both = one | {key: plan for key, plan in other.items() if key.name != "web-1"}
    node = NODES[Family.IPV4]
    backend.sync(changed_update(node, both, both))
    assert state(Family.IPV4, kernel) != empty
    backend.sync(changed_update(node, one, [key for key in both if key not in one]))
    assert state(Family.IPV4, kernel) == empty


def test_foreign_virtual_servers_are_kept(make: Callable[..., IpvsBackend], kernel: VirtualServers) -> None:
    theirs = {
        ServerKey(Family.IPV4, 0, parse_address("192.0.2.99"), Protocol.TCP, 80),
        ServerKey(Family.IPV4, 77, None, 0, 0),
    }
    kernel.write([PutServer(key, Scheduling("rr"), new=True) for key in theirs])
    full(make(), web("10.244.2.1"))
    assert theirs < kernel.read(Family.IPV4).keys()
    cleanup(dry_run=False)
    assert kernel.read(Family.IPV4).keys() == theirs
    kernel.write([DeleteServer(key) for key in theirs])


def test_virtual_servers_in_excluded_networks_are_kept(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    full(make(), web("10.244.2.1"))
    stray = WEB._replace(port=99)
    kernel.write([PutServer(stray, Scheduling("rr"), new=True)])
    full(make(excludeCIDRs=["10.96.0.0/16"]), web("10.244.2.1"))
    assert stray in kernel.read(Family.IPV4)
    full(make(), web("10.244.2.1"))
    assert stray not in kernel.read(Family.IPV4)


def test_every_scheduler_replaces_another_one(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    for scheduler in (*SCHEDULERS, SCHEDULERS[0]):
        backend = make(scheduler=scheduler)
        assert full(backend, web("10.244.2.1")) > 0
        assert kernel.read(Family.IPV4)[WEB].scheduling.scheduler == scheduler
        assert full(backend, web("10.244.2.1")) == 0


def test_sysctls_are_set(make: Callable[..., IpvsBackend]) -> None:
    values = {
        "net/ipv4/vs/conntrack": "1", "net/ipv4/vs/expire_nodest_conn": "1",
        "net/ipv4/vs/expire_quiescent_template": "1", "net/ipv4/ip_forward": "1",
        "net/ipv4/conf/all/arp_ignore": "1", "net/ipv4/conf/all/arp_announce": "2",
    }  # fmt: skip
    full(make(strictARP=True), web("10.244.2.1"))
    assert {name: Path("/proc/sys", name).read_text().strip() for name in values} == values


def test_cleanup_removes_everything_and_dry_run_nothing(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    for family in Family:
        full(make(), everything(family))
    before = [state(family, kernel) for family in Family]
    listed = cleanup(dry_run=True)
    assert [state(family, kernel) for family in Family] == before
    theirs = ["-t", "nat", "-A", "PREROUTING", "-d", "192.0.2.3", "-j", "RETURN"]
    subprocess.run(["iptables", *theirs], check=True)
    removed = cleanup(dry_run=False)
    assert removed == listed
    assert not removed.errors
    for family in Family:
        assert not kernel.read(family)
        assert not any(chain.startswith("KUBE-") for _, chain in rules_of(family))
    assert not device.exists()
    assert not sets.existing(names.SETS)
    assert "192.0.2.3" in " ".join(rules_of(Family.IPV4)["nat", "PREROUTING"])
    assert cleanup(dry_run=False).removed == ()


def test_a_cleanup_that_could_not_delete_virtual_servers_can_be_repeated(
    make: Callable[..., IpvsBackend], kernel: VirtualServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(make(), everything(Family.IPV4))

    def fail(*_: object) -> None:
        raise HostError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(VirtualServers, "write", fail)
        assert cleanup(dry_run=False).errors == ("refused",)
    assert not cleanup(dry_run=False).errors
    assert not kernel.read(Family.IPV4)
    assert not device.exists()
    assert not sets.existing(names.SETS)


@pytest.mark.parametrize(("family", "vip", "own"), [
    (Family.IPV4, "10.96.0.1", "192.0.2.1"), (Family.IPV6, "fd00::1", "2001:db8::1"),
])  # fmt: skip
def test_lent_source_is_used_for_connections_to_a_vip(family: Family, vip: str, own: str) -> None:
    version = "-4" if family is Family.IPV4 else "-6"
    number = socket.AF_INET if family is Family.IPV4 else socket.AF_INET6

    def source() -> str:
        with socket.socket(number, socket.SOCK_DGRAM) as sock:
            sock.connect((vip, 9))
            return str(sock.getsockname()[0])

    device.ensure()
    device.bind([parse_address(vip)], family)
    subprocess.run(["ip", version, "address", "add", own, "dev", "lo"], check=True)
    try:
        assert source() == vip
        for _ in range(2):
            device.lend_source([parse_address(vip)], parse_address(own), family)
            assert source() == own
        device.bind([parse_address(vip)], family)
        device.unbind([parse_address(vip)], family)
        device.unbind([parse_address(vip)], family)
        routes = ["ip", version, "route", "show", "table", "local", vip]
        assert subprocess.check_output(routes) == b""
    finally:
        subprocess.run(["ip", version, "address", "del", own, "dev", "lo"], check=True)


def test_removed_endpoint_keeps_its_connections(
    make: Callable[..., IpvsBackend], kernel: VirtualServers, pods: tuple[str, str]
) -> None:
    leaving, other = pods
    backend = make()
    full(backend, web(leaving))
    with socket.create_connection(("10.96.0.1", 80), timeout=10) as connection:
        assert answers(connection)
        change(backend, web(other))
        assert weight(kernel.read(Family.IPV4), leaving) == 0
        assert answers(connection), "the connection ended with its endpoint"
        change(backend, web(leaving, other))
        assert weight(kernel.read(Family.IPV4), leaving) == 1
        change(backend, web(other))
        backend = make()
        full(backend, web(other))
        assert weight(kernel.read(Family.IPV4), leaving) == 0, "a restart forgot the connection"
        # A reset, so that nothing waits in TIME_WAIT.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until = time.monotonic() + 60
    while weight(kernel.read(Family.IPV4), leaving) is not None and time.monotonic() < until:
        time.sleep(1)
    assert weight(kernel.read(Family.IPV4), leaving) is None
    assert weight(kernel.read(Family.IPV4), other) == 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_new_connections_avoid_draining_endpoints(
    scheduler: str, make: Callable[..., IpvsBackend], kernel: VirtualServers, pods: tuple[str, str]
) -> None:
    backend = make(scheduler=scheduler)
    full(backend, web(*pods))
    with socket.create_connection(("10.96.0.1", 80), timeout=10) as connection:
        assert answers(connection)
        (used,) = [item.where for item in kernel.destinations(WEB) if item.active]
        change(backend, web(*(pod for pod in pods if parse_address(pod) != used.address)))
        for _ in range(3):
            with socket.create_connection(("10.96.0.1", 80), timeout=10) as another:
                assert answers(another)


def test_removed_endpoint_without_connections_is_deleted_at_once(
    make: Callable[..., IpvsBackend], kernel: VirtualServers, pods: tuple[str, str]
) -> None:
    backend = make()
    full(backend, web(*pods))
    change(backend, web(pods[0]))
    assert weight(kernel.read(Family.IPV4), pods[1]) is None


def test_changed_weights_are_corrected(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    backend = make()
    full(backend, web("10.244.2.1"))
    where = Destination(parse_address("10.244.2.1"), 8080)
    kernel.write([PutDestination(WEB, where, 5, new=False)])
    assert full(backend, web("10.244.2.1")) == 1
    assert weight(kernel.read(Family.IPV4), "10.244.2.1") == 1


def test_unusable_endpoint_does_not_affect_others(
    make: Callable[..., IpvsBackend], kernel: VirtualServers, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["ip", "address", "add", "192.0.2.65/26", "brd", "192.0.2.127", "dev", "lo"], check=True)
    try:
        backend = make()
        full(backend, web("10.244.2.1"))
        slices = endpoint_slice("other", "10.244.2.9")
        other = plans(NODES[Family.IPV4], service("other", ip="10.96.0.9"), slices)
        wanted = web("192.0.2.127", "10.244.2.1", "10.244.2.2") | other
        assert change(backend, wanted) > 0
        assert "10.96.0.1:80/TCP" in str([vars(record) for record in caplog.records])
        assert weight(kernel.read(Family.IPV4), "10.244.2.2") == 1
        on_device, _ = device.read(Family.IPV4)
        assert parse_address("10.96.0.9") in on_device
        told = len(caplog.records)
        assert full(backend, wanted) == full(backend, wanted) == 0, "what can't be counts as written"
        assert len(caplog.records) == told
        assert change(backend, web("10.244.2.1") | other) > 0
        assert full(backend, web("10.244.2.1") | other) == 0
    finally:
        subprocess.run(["ip", "address", "del", "192.0.2.65/26", "dev", "lo"], check=True)


def test_iptables_failures_are_counted(make: Callable[..., IpvsBackend]) -> None:
    backend = make()
    full(backend, web("10.244.2.1"))
    assert [found.value for found in backend.measure()] == [0, 0]
    subprocess.run(["iptables", "-w", "-F", "KUBE-IPVS-FILTER"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeleton, "no_frontend", lambda family: "-j NO-SUCH-TARGET")
        with pytest.raises(SyncFailed):
            full(backend, web("10.244.2.1"))
    assert {found.labels["ip_family"]: found.value for found in backend.measure()} == {
        "IPv4": 1, "IPv6": 0}  # fmt: skip
    full(backend, web("10.244.2.1"))
    assert full(backend, web("10.244.2.1")) == 0


def test_cleanup_and_retirement_keep_excluded_networks(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    full(make(), web("10.244.2.1"))
    stray = WEB._replace(port=99)
    kernel.write([PutServer(stray, Scheduling("rr"), new=True)])
    excluded = [parse_cidr("10.96.0.0/16")]
    assert not retire(excluded).errors
    assert {WEB, stray} <= kernel.read(Family.IPV4).keys()
    assert not cleanup(excluded, dry_run=False).errors
    assert kernel.read(Family.IPV4).keys() == {WEB, stray}
    assert not device.exists()
    kernel.write([DeleteServer(WEB), DeleteServer(stray)])


def test_cleanup_flags(make: Callable[..., IpvsBackend], kernel: VirtualServers) -> None:
    full(make(), web("10.244.2.1"))
    run("--cleanup", "--cleanup-ipvs=false")
    assert WEB in kernel.read(Family.IPV4)
    assert device.exists()
    run("--cleanup", "--ipvs-exclude-cidrs=10.96.0.0/24")
    assert WEB in kernel.read(Family.IPV4)
    assert not device.exists()
    full(make(), web("10.244.2.1"))
    run("--cleanup")
    assert not kernel.read(Family.IPV4)


def test_init_only_loads_modules_and_sets_sysctls(tmp_path: Path) -> None:
    """It leaves addresses, sets and rules alone."""
    subprocess.run(["modprobe", "ip_vs"], check=True)
    subprocess.run(["modprobe", "-r", "ip_vs_sed"], check=True)
    values = {"net/ipv4/vs/conntrack": "1", "net/ipv4/ip_forward": "1", "net/ipv4/conf/all/arp_announce": "2"}
    for name in values:
        Path("/proc/sys", name).write_text("0")
    run("--init-only", "--mode=ipvs", "--ipvs-scheduler=sed", "--ipvs-strict-arp", f"--manifests={tmp_path}")
    assert {name: Path("/proc/sys", name).read_text().strip() for name in values} == values
    assert Path("/sys/module/ip_vs_sed").is_dir()
    assert not device.read(Family.IPV4)[0]
    assert not sets.existing(names.SETS)
    assert not any(chain.startswith("KUBE-") for _, chain in rules_of(Family.IPV4))


def run(*options: str) -> None:
    """Run the program."""
    program = Path(sys.executable).with_name("kproxy")
    done = subprocess.run([program, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_connection_timeouts_are_set(make: Callable[..., IpvsBackend], pods: tuple[str, str]) -> None:
    dns = service("dns", "53/UDP", ip="10.96.0.2")
    piece = endpoint_slice("dns", pods[0], ports=["53/UDP"])
    wanted = web(pods[0]) | plans(NODES[Family.IPV4], dns, piece)
    full(make(tcpTimeout=777.0, udpTimeout=555.0), wanted)
    full(make(tcpFinTimeout=30.0), wanted)  # It leaves the others as they are.
    with (
        socket.create_connection(("10.96.0.1", 80), timeout=10) as connection,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        assert answers(connection)
        datagrams.sendto(b"hello", ("10.96.0.2", 53))
        rows = [line.split() for line in connections.CONNECTIONS.read_text().splitlines()]
    expires = {(row[0], row[7]): int(row[8]) for row in rows[1:] if row[3] in ("0A600001", "0A600002")}
    assert 700 < expires["TCP", "ESTABLISHED"] <= 777
    assert 500 < expires["UDP", "UDP"] <= 555


def test_damage_to_the_device_is_reported_and_repaired(
    make: Callable[..., IpvsBackend], kernel: VirtualServers
) -> None:
    backend = make()
    wanted = everything(Family.IPV4)
    full(backend, wanted)
    before = state(Family.IPV4, kernel)
    seen: Queue[tuple[Family, str]] = Queue()
    backend.watch(lambda family, what: seen.put((family, what)))
    change(backend, web("10.244.2.1"))
    backend.sync(changed_update(NODES[Family.IPV4], wanted, web("10.244.2.1")))
    for damage, told in (
        ("address del 10.96.0.2/32 dev kube-ipvs0", "10.96.0.2 deleted from kube-ipvs0"),
        ("link delete kube-ipvs0", "interface kube-ipvs0 deleted"),
    ):
        subprocess.run(["ip", *damage.split()], check=True)
        while (report := seen.get(timeout=20)) != (Family.IPV4, told):
            assert "kube-ipvs0" in report[1]
        full(backend, wanted)
        assert state(Family.IPV4, kernel) == before
