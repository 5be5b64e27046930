"""The node's addresses, read and watched in network namespaces made for the tests."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from kproxy_conformance.builders import addresses
from kproxy_core.linux.addresses import AddressWatch, default_source_address, node_addresses
from kproxy_core.model.address import Address, Family, format_address
from tests.core.namespaces import Namespace, namespace

LOOPBACK = frozenset(addresses("127.0.0.1 ::1"))


@pytest.fixture
def inside() -> Iterator[Namespace]:
    with namespace() as made:
        made.ip("link add one type veth peer name two", "link set two up", "link set one up")
        # Link-local addresses come by themselves; here only those that a test adds are wanted.
        made.ip("addr flush dev one", "addr flush dev two")
        yield made


class Following:
    """The reports of a watch in a namespace."""

    def __init__(self, inside: Namespace) -> None:
        self._reports: queue.Queue[frozenset[Address]] = queue.Queue()
        self.hold = threading.Lock()
        self.watch: AddressWatch = inside.inside(lambda: AddressWatch(self._report))

    def _report(self, found: frozenset[Address]) -> None:
        with self.hold:
            self._reports.put(found)

    def next(self) -> frozenset[Address]:
        return self._reports.get(timeout=120)

    def until(self, wanted: Callable[[frozenset[Address]], bool]) -> frozenset[Address]:
        while not wanted(found := self.next()):
            pass
        return found

    @property
    def quiet(self) -> bool:
        return self._reports.empty()


@pytest.fixture
def following(inside: Namespace) -> Iterator[Following]:
    made = Following(inside)
    yield made
    made.watch.close()


def test_all_addresses_of_all_interfaces(inside: Namespace) -> None:
    inside.ip(
        "addr add 172.18.0.2/24 dev one",
        "addr add 172.18.0.3/24 dev one",
        "addr add 172.19.0.2 peer 172.19.0.1/32 dev two",
        "addr add fd00::2/64 dev one",
        "addr add fd00:1::2 peer fd00:1::1/128 dev two",
        "addr add fe80::5/64 dev two",
    )
    assert inside.inside(node_addresses) == LOOPBACK | set(
        addresses("172.18.0.2 172.18.0.3 172.19.0.2 fd00::2 fd00:1::2 fe80::5")
    )


def test_more_addresses_than_one_message_holds(inside: Namespace) -> None:
    made = [f"10.{n // 250}.{n % 250}.1" for n in range(3000)]
    inside.ip(*(f"addr add {address}/32 dev lo" for address in made))
    assert inside.inside(node_addresses) == LOOPBACK | set(addresses(" ".join(made)))


def test_a_watch_reports_added_and_deleted_addresses(inside: Namespace, following: Following) -> None:
    assert following.watch.addresses == LOOPBACK
    for text in ("172.18.0.2/24", "fd00::2/64"):
        (address,) = addresses(text.partition("/")[0])
        inside.ip(f"addr add {text} dev one")
        assert following.next() == LOOPBACK | {address}
        assert following.watch.addresses == LOOPBACK | {address}
        inside.ip(f"addr del {text} dev one")
        assert following.next() == LOOPBACK
    assert following.quiet


def test_addresses_of_other_interfaces_do_not_count(inside: Namespace) -> None:
    """Neither when addresses are read, nor when they are added or deleted."""
    (own,) = addresses("172.18.0.2")
    inside.ip("link add kube-ipvs0 type veth peer name other", "addr add 10.96.0.1/32 dev kube-ipvs0")
    inside.ip("addr add 172.18.0.2/24 dev one")

    def wanted(name: str) -> bool:
        return name != "kube-ipvs0"

    assert inside.inside(lambda: node_addresses(wanted)) == LOOPBACK | {own}
    reports: queue.Queue[frozenset[Address]] = queue.Queue()
    watch = inside.inside(lambda: AddressWatch(reports.put, wanted))
    try:
        inside.ip("addr add 10.96.0.2/32 dev kube-ipvs0", "addr del 10.96.0.1/32 dev kube-ipvs0")
        inside.ip("addr add 10.96.0.2/32 dev two")
        assert reports.get(timeout=120) == LOOPBACK | {own} | set(addresses("10.96.0.2"))
        inside.ip("link del kube-ipvs0", "addr del 172.18.0.2/24 dev one")
        assert reports.get(timeout=120) == LOOPBACK | set(addresses("10.96.0.2"))
        assert reports.empty()
    finally:
        watch.close()


def test_a_watch_reports_addresses_deleted_with_their_interface(
    inside: Namespace, following: Following
) -> None:
    inside.ip("addr add 172.18.0.2/24 dev one", "addr add fd00::2/64 dev one")
    following.until(lambda found: found == LOOPBACK | set(addresses("172.18.0.2 fd00::2")))
    inside.ip("link del one")
    assert following.until(lambda found: found == LOOPBACK)


def test_a_watch_is_silent_while_the_set_is_the_same(inside: Namespace, following: Following) -> None:
    (address,) = addresses("172.18.0.2")
    inside.ip("addr add 172.18.0.2/24 dev one")
    assert following.next() == LOOPBACK | {address}
    inside.ip(
        "addr add 172.18.0.2/32 dev two",
        "addr del 172.18.0.2/24 dev one",
        "addr change 172.18.0.2/32 dev two valid_lft 1000 preferred_lft 1000",
        "addr del 172.18.0.2/32 dev two",
    )
    assert following.next() == LOOPBACK
    assert following.quiet


def test_a_watch_survives_lost_notifications(
    inside: Namespace, following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    """Its callback blocks, so the kernel drops notifications."""
    caplog.set_level(logging.INFO)
    made = [f"10.{n // 250}.{n % 250}.1" for n in range(2000)]
    with following.hold:
        inside.ip("addr add 172.18.0.2/24 dev one")
        inside.ip(*(f"addr add {address}/32 dev two" for address in made))
        inside.ip("addr del 172.18.0.2/24 dev one")
        inside.ip(*(f"addr del {address}/32 dev two" for address in made[1:]))
    assert following.until(lambda found: found == LOOPBACK | set(addresses(made[0])))
    assert "notifications lost" in caplog.text
    inside.ip(f"addr del {made[0]}/32 dev two")
    assert following.next() == LOOPBACK


def test_a_closed_watch_is_silent_and_leaves_no_thread(inside: Namespace, following: Following) -> None:
    following.watch.close()
    following.watch.close()
    inside.ip("addr add 172.18.0.2/24 dev one")
    assert following.quiet
    assert not [thread for thread in threading.enumerate() if thread.name == "kproxy-addresses"]


@pytest.mark.parametrize(("family", "address", "gateway"), [
    (Family.IPV4, "172.18.0.2/24", "172.18.0.1"), (Family.IPV6, "fd00::2/64 nodad", "fd00::1"),
])
def test_the_source_address_of_the_default_route(
    inside: Namespace, family: Family, address: str, gateway: str
) -> None:
    def source() -> str:
        found = inside.inside(lambda: default_source_address(family))
        return "none" if found is None else format_address(found)

    assert source() == "none"
    inside.run("ip", "addr", "add", *address.split(), "dev", "one")
    assert source() == "none"
    inside.ip(f"route add default via {gateway}")
    assert source() == address.partition("/")[0]


def test_a_default_route_without_an_address_has_no_source(inside: Namespace) -> None:
    inside.run("ip", "-6", "route", "add", "default", "dev", "one")
    inside.ip("addr add fe80::5/64 dev one nodad")
    assert inside.inside(lambda: default_source_address(Family.IPV6)) is None
