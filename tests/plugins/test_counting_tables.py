"""Tables that count connections: completed by every resync, and never without their counts."""

import errno
import struct
import subprocess
from collections.abc import Callable, Iterator

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_core.contract.values import Connections, Scope, Update
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.netlink.messages import attribute, nested, text_attribute
from kproxy_core.nft.elements import CATCH_ALL, Element
from kproxy_core.nft.fake import BATCH_BEGIN, FakeKernel
from kproxy_core.nft.listing import HeldTable
from kproxy_core.nft.messages import Command
from kproxy_core.nft.objects import DORMANT, Chain, Container, Hook
from kproxy_core.nft.rules import ADDRESS, RETURN
from kproxy_core.nft.transaction import RulesetSocket
from kproxy_core.nft.watch import generation
from kproxy_core.plan.service_plan import Frontend
from kproxy_nft.counting import CONNECTIONS, REJECTED, UNSERVED_SETS, counting_layout, counting_table
from kproxy_nft.table import Counting

NODE = node_view(anywhere=True)
COUNTED = Connections(
    Frontend(parse_address("10.96.0.1"), Protocol.TCP, 80), Destination(parse_address("10.0.0.1"), 8080), 7)
UNSERVED = UNSERVED_SETS[0]

IPV4 = Family.IPV4
TABLE = counting_table(IPV4, ipvs=False)
LAYOUT = counting_layout(IPV4, ipvs=False)


SERVED = plans(NODE, service("empty", ip="10.96.0.2"), endpoint_slice("empty", "10.0.0.2"))
WANTED = {
    **plans(NODE, service("web"), endpoint_slice("web", "10.0.0.1")),
    **plans(NODE, service("empty", ip="10.96.0.2")),
}


def resync(counting: Counting, during: Callable[[], object] = lambda: None) -> None:
    """Sync a Service with an endpoint and one without."""
    with counting.during(Update(Family.IPV4, Scope.RESYNC, NODE, WANTED, WANTED)):
        during()


def run(*commands: Command) -> None:
    """Run *commands* as another process."""
    with RulesetSocket.open() as connection:
        connection.run(commands)


def container(name: str) -> Container:
    found = LAYOUT[name]
    assert isinstance(found, Container)
    return found


def add(name: str, *elements: Element) -> Iterator[Command]:
    return TABLE.add_elements(container(name), elements)


def counter(packets: int) -> bytes:
    counts = attribute(1, struct.pack(">Q", packets * 60)), attribute(2, struct.pack(">Q", packets))
    return text_attribute(1, "counter") + nested(2, *counts)


def count() -> None:
    run(*add(CONNECTIONS, Element(
        bytes([10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0, 10, 0, 0, 1, 8080 >> 8, 8080 & 0xFF, 0, 0]),
        expressions=(counter(7),))))


def held() -> tuple[HeldTable, int]:
    """Return the table with all elements, and the number of the last commit."""
    with RulesetSocket.open() as connection:
        found = connection.read(IPV4, TABLE.name, [*UNSERVED_SETS, CONNECTIONS, REJECTED])
        assert found is not None
        plain = {
            chain: [rule._replace(handle=0) for rule in rules] for chain, rules in found.rules.items()}
        return found._replace(rules=plain), generation(connection.socket)


def is_unserved() -> bool:
    return bool(held()[0].elements[UNSERVED])


@pytest.mark.usefixtures("nf_tables")
def test_a_restart_writes_nothing_and_keeps_the_counts() -> None:
    resync(Counting())
    count()
    before = held()
    again = Counting()
    resync(again)
    assert held() == before
    assert again.read(IPV4) == [COUNTED]


MORE = Chain("more", (), Hook("nat", "output", -90))
DAMAGES: dict[str, list[Command]] = {
    "no rules": [TABLE.flush_chain("count")],
    "a chain deleted": [*TABLE.remove([Chain("output")])],
    "another rule": [*TABLE.write([Chain("more", ((RETURN,),))])],
    "another base chain": [*TABLE.write([MORE])],
    "dormant": [TABLE._replace(flags=DORMANT).create()],
    "another element": [*add(UNSERVED, Element(bytes([10, 96, 0, 3, 6, 0, 0, 0, 0, 80, 0, 0])))],
    "catch-alls": [command for name in UNSERVED_SETS for command in add(name, CATCH_ALL)],
    "a catch-all that counts": [*add(REJECTED, Element(b"", expressions=(counter(7),)))],
    "a catch-all with a timeout": [*add(CONNECTIONS, Element(b"", timeout=3_600_000))],
    "no elements": [TABLE.empty(container(UNSERVED))],
}


@pytest.mark.usefixtures("nf_tables")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_repaired_without_losing_counts(damage: str) -> None:
    counting = Counting()
    resync(counting)
    count()
    before, _ = held()
    run(*DAMAGES[damage])
    assert held()[0] != before
    assert counting.read(IPV4) == [COUNTED]
    resync(counting)
    assert held()[0] == before
    assert counting.read(IPV4) == [COUNTED]


def nft(text: str) -> str:
    return subprocess.run(["nft", "-s", text], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("netns")
@pytest.mark.parametrize("damage", [
    "insert rule ip kproxy-counts postrouting accept",
    "add chain ip kproxy-counts x { type filter hook forward priority 0; }; "
    "add rule ip kproxy-counts x meta mark { 7, 8 } jump { drop; }",
    "add rule ip kproxy-counts output jump { drop; }",
    "add counter ip kproxy-counts x; add rule ip kproxy-counts output counter name x",
])  # fmt: skip
def test_damage_by_nft_is_repaired_without_losing_counts(damage: str) -> None:
    """With sets and chains that belong to a rule, which the kernel in memory refuses."""
    counting = Counting()
    resync(counting)
    count()
    before, text = held()[0], sorted(nft("list table ip kproxy-counts").splitlines())
    nft(damage)
    assert counting.read(IPV4) == [COUNTED]
    resync(counting)
    assert held()[0] == before
    assert sorted(nft("list table ip kproxy-counts").splitlines()) == text
    assert counting.read(IPV4) == [COUNTED]


@pytest.mark.usefixtures("nf_tables")
def test_a_table_of_another_layout_is_replaced() -> None:
    resync(Counting())
    before, _ = held()
    other = Container(CONNECTIONS, (ADDRESS[IPV4],))
    run(TABLE.delete(), TABLE.create(), *TABLE.write([Chain("output"), other]))
    resync(Counting())
    assert held()[0] == before


@pytest.mark.usefixtures("nf_tables")
def test_a_frontend_is_unserved_if_it_has_no_endpoints_before_and_after_a_sync() -> None:
    counting, seen = Counting(), list[bool]()
    for _ in range(2):
        resync(counting, lambda: seen.append(is_unserved()))
    assert seen == [False, True]
    with counting.during(Update(IPV4, Scope.CHANGED, NODE, SERVED, WANTED)):
        assert not is_unserved()
    assert not is_unserved()
    emptied = {key: plan for key, plan in WANTED.items() if key in SERVED}
    with counting.during(Update(IPV4, Scope.CHANGED, NODE, emptied, WANTED)):
        assert not is_unserved()
    assert is_unserved()


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOMEM])
def test_counting_that_the_kernel_refuses_once_is_completed_by_the_next_sync(code: int) -> None:
    with FakeKernel() as kernel:
        counting = Counting()
        kernel.refuse(code, kind=BATCH_BEGIN, times=2)
        resync(counting)
        resync(counting)
        assert held()[0].chains.keys() >= {"output", "count"}
        assert is_unserved()
