"""Tables that count connections: completed by every resync, and never without their counts."""

import subprocess
from collections.abc import Callable

import pytest

from kproxy_conformance.builders import endpoint_slice, node_view, plans, service
from kproxy_conformance.checks.kernel_state import commits
from kproxy_core.contract.values import Connections, Scope, Update
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import Frontend
from kproxy_nft.table import Counting

NODE = node_view(anywhere=True)
COUNTED = Connections(
    Frontend(parse_address("10.96.0.1"), Protocol.TCP, 80), Destination(parse_address("10.0.0.1"), 8080), 7)
UNSERVED = "10.96.0.2 . tcp . 80"

pytestmark = pytest.mark.usefixtures("netns")


def nft(text: str) -> str:
    return subprocess.run(["nft", "-s", text], capture_output=True, text=True, check=True).stdout


SERVED = plans(NODE, service("empty", ip="10.96.0.2"), endpoint_slice("empty", "10.0.0.2"))
WANTED = {
    **plans(NODE, service("web"), endpoint_slice("web", "10.0.0.1")),
    **plans(NODE, service("empty", ip="10.96.0.2")),
}


def resync(counting: Counting, during: Callable[[], object] = lambda: None) -> None:
    """Sync a Service with an endpoint and one without."""
    with counting.during(Update(Family.IPV4, Scope.RESYNC, NODE, WANTED, WANTED)):
        during()


def count() -> None:
    nft("add element ip kproxy-counts connections "
        "{ 10.96.0.1 . tcp . 80 . 10.0.0.1 . 8080 counter packets 7 bytes 420 }")  # fmt: skip


def listed() -> str:
    """Return the lines of the table, sorted: a chain that was deleted is listed last."""
    return "\n".join(sorted(nft("list table ip kproxy-counts").splitlines()))


def test_a_restart_writes_nothing_and_keeps_the_counts() -> None:
    resync(Counting())
    count()
    before, written = listed(), commits()
    again = Counting()
    resync(again)
    assert (listed(), commits()) == (before, written)
    assert again.read(Family.IPV4) == [COUNTED]


@pytest.mark.parametrize("damage", [
    "flush chain ip kproxy-counts count", "insert rule ip kproxy-counts postrouting accept",
    "flush chain ip kproxy-counts output; delete chain ip kproxy-counts output",
    "add chain ip kproxy-counts more { type nat hook output priority -90; }",
    "add table ip kproxy-counts { flags dormant; }", "flush set ip kproxy-counts unserved",
    "add element ip kproxy-counts unserved { 10.96.0.3 . tcp . 80 }",
    "add element ip kproxy-counts unserved { * }", "add element ip kproxy-counts unserved-node-ports { * }",
    "add element ip kproxy-counts connections { * timeout 1h }",
    "add element ip kproxy-counts rejected { * counter packets 7 bytes 420 }",
    "add chain ip kproxy-counts x { type filter hook forward priority 0; }; "
    "add rule ip kproxy-counts x meta mark { 7, 8 } jump { drop; }",
    "add rule ip kproxy-counts output jump { drop; }",
    "add counter ip kproxy-counts x; add rule ip kproxy-counts output counter name x",
])  # fmt: skip
def test_damage_is_repaired_without_losing_counts(damage: str) -> None:
    counting = Counting()
    resync(counting)
    count()
    before = listed()
    nft(damage)
    assert listed() != before
    assert counting.read(Family.IPV4) == [COUNTED]
    resync(counting)
    assert listed() == before
    assert counting.read(Family.IPV4) == [COUNTED]


def test_a_table_of_another_layout_is_replaced() -> None:
    resync(Counting())
    before = listed()
    nft("delete table ip kproxy-counts; add table ip kproxy-counts; add chain ip kproxy-counts output; "
        "add set ip kproxy-counts connections { type ipv4_addr; }")  # fmt: skip
    resync(Counting())
    assert listed() == before


def test_a_frontend_is_unserved_if_it_has_no_endpoints_before_and_after_a_sync() -> None:
    counting, seen = Counting(), []
    for _ in range(2):
        resync(counting, lambda: seen.append(UNSERVED in listed()))
    assert seen == [False, True]
    with counting.during(Update(Family.IPV4, Scope.CHANGED, NODE, SERVED, WANTED)):
        assert UNSERVED not in listed()
    assert UNSERVED not in listed()
    emptied = {key: plan for key, plan in WANTED.items() if key in SERVED}
    with counting.during(Update(Family.IPV4, Scope.CHANGED, NODE, emptied, WANTED)):
        assert UNSERVED not in listed()
    assert UNSERVED in listed()
