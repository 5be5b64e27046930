"""A network namespace of its own for every test that relays, with a node in it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kproxy_conformance.network.namespaces import Namespace

from .proxies import Proxy, Start


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Move the test's thread, and what it starts, to a node with addresses and a default route."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    with closing(Namespace("node")) as made, made.entered():
        made.add_veth("node0", made, "lan0")
        for number in (1, 2, 3):
            made.add_address(f"192.0.2.{number}/24", "node0")
        made.add_address("2001:db8::1/64", "node0")
        made.add_address("fd00:1::1/64", "lo")
        made.add_route("0.0.0.0/0", via="192.0.2.254")
        made.add_route("::/0", via="2001:db8::fe")
        yield


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Proxy] = []

    def make(**options: object) -> Proxy:
        made.append(Proxy(**options))
        return made[-1]

    yield make
    for proxy in made:
        proxy.backend.close()
