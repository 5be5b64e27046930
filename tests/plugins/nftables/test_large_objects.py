"""Objects around and beyond the limits of netlink: an attribute has 65,535 bytes at most."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import endpoint, endpoint_slice, plans, service
from kproxy_core.contract.errors import SyncFailed
from kproxy_core.model.address import Address, Cidr, Family, parse_address, parse_cidr
from kproxy_core.netlink.messages import TooLong, attribute, fitting, nested
from kproxy_core.nft.elements import Element
from kproxy_core.nft.objects import Chain, Container, Table
from kproxy_core.nft.rules import among, source_address
from kproxy_nftables import skeleton
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.kernel import Kernel

from .test_kernel import BOTH, NODES, Plans, change, nft, resync

netns = pytest.mark.usefixtures("netns")


@pytest.fixture
def backend(netns: None) -> Iterator[NftablesBackend]:
    made = NftablesBackend(BOTH)
    yield made
    made.close()


def pods(family: Family, count: int) -> list[str]:
    return [
        f"10.244.{number >> 8}.{number & 255}" if family is Family.IPV4 else f"fd00:1::{number:x}"
        for number in range(1, count + 1)
    ]  # fmt: skip


def wide(family: Family, count: int) -> Plans:
    """Return the plan of a Service with session affinity, policy Local and *count* endpoints."""
    vip, balancer = ("10.96.0.1", "203.0.113.1") if family is Family.IPV4 else ("fd00:96::1", "2001:db8::1")
    here = [endpoint(address, "node1") for address in pods(family, count)]
    svc = service("wide", ip=vip, load_balancer_ips=balancer, external_local=True, affinity=60)
    return plans(NODES[family], svc, endpoint_slice("wide", *here))


def held(family: Family, name: str) -> int:
    """Return the number of elements of the first set whose name begins with *name*."""
    with Kernel() as kernel:
        return next(count for found, count in kernel.counts(family).items() if found.startswith(name))


@pytest.mark.parametrize(("family", "count"), [
    *((Family.IPV4, count) for count in (4095, 4096, 4097, 9000)),
    *((Family.IPV6, count) for count in (2340, 2341, 9000)),
])
def test_a_service_with_affinity_has_any_number_of_endpoints(
    backend: NftablesBackend, family: Family, count: int
) -> None:
    resync(backend, {}, NODES[family])
    change(backend, dict(wide(family, count)), NODES[family])
    assert held(family, "endpoints-") == count
    assert resync(backend, wide(family, count), NODES[family]).operations == 0
    change(backend, dict(wide(family, count - 1)), NODES[family])
    assert held(family, "endpoints-") == count - 1
    assert resync(backend, wide(family, count), NODES[family]).operations > 0
    assert held(family, "endpoints-") == count


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize("count", [1600, 5000])
def test_any_number_of_service_networks(backend: NftablesBackend, family: Family, count: int) -> None:
    networks = [
        parse_cidr(f"10.{number >> 7}.{2 * (number & 127)}.0/24" if family is Family.IPV4
                   else f"fd00:96:{2 * number:x}::/48") for number in range(count)
    ]  # fmt: skip
    node = replace(NODES[family], service_cidrs=tuple(networks))
    resync(backend, {}, NODES[family])
    change(backend, {}, node)
    assert nft(f"list set {family.ip} kproxy service-cidrs").count("/") == count
    assert resync(backend, {}, node).operations == 0
    resync(backend, {}, NODES[family])
    assert resync(backend, {}, node).operations > 0
    assert nft(f"list set {family.ip} kproxy service-cidrs").count("/") == count


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_any_number_of_source_ranges(backend: NftablesBackend, family: Family) -> None:
    ranges = " ".join(
        f"10.{number >> 7}.{2 * (number & 127)}.0/25" if family is Family.IPV4
        else f"2001:db8:{2 * number:x}::/48" for number in range(10_000))
    vip, balancer = ("10.96.0.1", "203.0.113.1") if family is Family.IPV4 else ("fd00:96::1", "2001:db8::1")
    svc = service("ranges", ip=vip, load_balancer_ips=balancer, source_ranges=ranges)
    wanted = plans(NODES[family], svc, endpoint_slice("ranges", pods(family, 1)[0]))
    resync(backend, {}, NODES[family])
    change(backend, dict(wanted), NODES[family])
    assert nft(f"list table {family.ip} kproxy").count("goto admitted\n") == 10_000
    assert resync(backend, wanted, NODES[family]).operations == 0


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_any_number_of_node_port_addresses(backend: NftablesBackend, family: Family) -> None:
    node = replace(NODES[family], node_port_addresses=tuple(map(parse_address, pods(family, 5000))))
    resync(backend, {}, node)
    assert held(family, "node-ips") == 5000
    assert resync(backend, {}, node).operations == 0


def test_the_longest_names(backend: NftablesBackend) -> None:
    name, port = f"{'n' * 63}/{'s' * 63}", "p" * 63
    svc = service(
        name, f"{port}:80@30080", load_balancer_ips="203.0.113.1",
        source_ranges="192.0.2.0/24", affinity=86400, external_local=True)
    piece = endpoint_slice(name, endpoint("10.244.1.1", "node1"), ports=(f"{port}:65535",))
    wanted = plans(NODES[Family.IPV4], svc, piece)
    assert wanted
    resync(backend, {})
    change(backend, dict(wanted))
    assert resync(backend, wanted).operations == 0


def test_elements_of_an_interval_are_written_together() -> None:
    """The kernel is never given the start of a network in one message and its end in another."""
    networks = tuple(
        Cidr(Address(bytes([10, number >> 8, number & 255, 0])), 24) for number in range(0, 4000, 2))
    container = Container("networks", (source_address(Family.IPV4),), interval=True, constant=networks)
    _, *added = Table(Family.IPV4, "kproxy").fill(container)
    assert len(added) > 1
    assert all(command.text.count("/") > 1 for command in added)
    assert sum(command.text.count("/") for command in added) == len(networks)


@pytest.mark.parametrize("sizes", [[], [4], [8] * 3, [65_531], [40_000, 40_000, 4], [100] * 2000])
def test_parts_of_lists_fit_into_attributes(sizes: list[int]) -> None:
    parts = [bytes(size) for size in sizes]
    slices = list(fitting(parts))
    assert [part for each in slices for part in parts[each]] == parts
    assert all(nested(1, *parts[each]) for each in slices)


def test_an_object_that_is_too_long_is_named() -> None:
    assert len(attribute(1, bytes(65_531))) == 65_536
    with pytest.raises(TooLong, match="attribute 1 has 65532 bytes"):
        attribute(1, bytes(65_532))
    table = Table(Family.IPV4, "kproxy")
    rule = among((source_address(Family.IPV4),), "x" * 66_000)
    with pytest.raises(TooLong, match=r"^mine in table ip kproxy: attribute 1 has 66001 bytes"):
        list(table.write([Chain("mine", ((rule,),))]))
    with pytest.raises(TooLong):
        list(table.add_elements(Container("mine", ()), [Element(bytes(70_000))]))


def test_a_sync_with_an_object_that_is_too_long_fails_as_others_do(
    backend: NftablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    resync(backend, {})
    wanted = wide(Family.IPV4, 2)
    with monkeypatch.context() as patched:
        patched.setattr(skeleton, "record_chain", lambda _: "x" * 70_000)
        with pytest.raises(SyncFailed, match="in table ip kproxy: attribute 3 has 70001 bytes"):
            change(backend, dict(wanted))
    change(backend, dict(wanted))
    assert resync(backend, wanted).operations == 0
