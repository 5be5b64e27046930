"""Very many portals of one Service that change at once."""

import subprocess

import pytest

from kproxy_conformance.builders import changed_update, endpoint_slice, full_update, plans, service
from kproxy_core.model.address import Family
from kproxy_userspace.backend import UserspaceBackend
from kproxy_xtables.tables import Tables

from .proxies import NODE, Start

pytestmark = pytest.mark.usefixtures("node")


def _redirects() -> int:
    saved = subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout
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
