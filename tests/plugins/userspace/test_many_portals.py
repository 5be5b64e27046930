"""Very many portals of one Service that change at once."""

import subprocess

import pytest

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, plans, service
from kproxy_core.model.address import Family
from kproxy_core.model.service import ServicePortKey
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_userspace.backend import UserspaceBackend
from kproxy_xtables.tables import Tables

from .proxies import NODE, Start

pytestmark = pytest.mark.usefixtures("node")


def _redirects(family: Family = Family.IPV4) -> int:
    program = "iptables-save" if family is Family.IPV4 else "ip6tables-save"
    saved = subprocess.run([program, "-t", "nat"], capture_output=True, text=True, check=True).stdout
    return saved.count("-j REDIRECT")


@pytest.mark.parametrize(("count", "one_by_one"), [(100, 200), (101, 0)])
def test_many_portals_are_deleted_by_replacing_their_chains(
    start: Start, monkeypatch: pytest.MonkeyPatch, count: int, one_by_one: int
) -> None:
    """Each deletion costs as much as the chain is long: 12,000 of them took 25 s."""
    backend: UserspaceBackend = start().backend
    node = NODE[Family.IPV4]
    small = plans(node, service("web"), endpoint_slice("web", "127.0.0.1"))
    ports = [f"p{at}:{at + 1}" for at in range(count)]
    large = plans(node, service("many", *ports, ip="10.96.0.2"))
    backend.sync(full_update(node, small | large))
    assert _redirects() == 2 * (count + 1)
    given: list[str] = []
    restore = Tables.restore

    def noted(tables: Tables, text: str) -> None:
        given.append(text)
        restore(tables, text)

    monkeypatch.setattr(Tables, "restore", noted)
    backend.sync(changed_update(node, small, large))
    assert "".join(given).count("-D KUBE-PORTALS") == one_by_one
    assert _redirects() == 2
    assert backend.sync(full_update(node, small)).operations == 0


@pytest.mark.parametrize("family", list(Family))
def test_many_source_ranges_are_written_in_parts(
    start: Start, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    monkeypatch.setattr("kproxy_userspace.applied.MOST_ADDED", 50)
    backend: UserspaceBackend = start().backend
    node, v4 = NODE[family], family is Family.IPV4
    vip, balancer, endpoint = (
        ("10.96.0.1", "203.0.113.1", "127.0.0.1") if v4 else ("fd00::1", "2001:db8::1", "::1"))

    def ranged(number: int) -> dict[ServicePortKey, ServicePlan]:
        source = f"198.18.{number}.{{}}/32" if v4 else f"fd00:{number}::{{}}/128"
        ranges = " ".join(map(source.format, range(120)))
        large = service("web", ip=vip, load_balancer_ips=balancer, source_ranges=ranges)
        return plans(node, large, endpoint_slice("web", endpoint))

    def syncs(wanted: dict[ServicePortKey, ServicePlan]) -> list[int]:
        """Sync until all is written. Return the number of redirects after each sync."""
        found: list[int] = []
        while True:
            left = backend.sync(changed_update(node, wanted, wanted)).unfinished
            found.append(_redirects(family) // 2)
            if not left:
                return found
            assert left == wanted.keys()

    backend.sync(full_update(node, {}))
    assert syncs(ranged(1)) == [50, 100, 121]
    assert syncs(ranged(2)) == [51, 101, 121]
    assert backend.sync(full_update(node, ranged(2))).operations == 0
    backend.sync(changed_update(node, {}, ranged(2)))
    assert _redirects(family) == 0
