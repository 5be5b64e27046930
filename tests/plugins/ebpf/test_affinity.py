"""Session affinity: a client is a network namespace."""

import time
from collections.abc import Iterator

import pytest

from tests.plugins.ebpf.node import REMOTE, Node, node, until
from tests.plugins.ebpf.sockets import Sockets
from tests.plugins.ebpf.test_translation import V4, dial

STICKY = tuple(f"10.96.3.{number}" for number in range(12))
BRIEF = tuple(f"10.96.4.{number}" for number in range(12))
"""With a timeout of one second. Two choices agree for all twelve once in 240 million runs."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node")) as made:
        for address in STICKY:
            serve(made, address, REMOTE, 10800)
        for address in BRIEF:
            serve(made, address, REMOTE, 1)
        with made.proxy():
            yield made


def serve(where: Node, address: str, endpoints: tuple[str, ...], seconds: int) -> None:
    name = f"s{address.replace('.', '-')}"
    where.serve(name, address, endpoints, sessionAffinity="ClientIP",
                sessionAffinityConfig={"clientIP": {"timeoutSeconds": seconds}})  # fmt: skip


def endpoints_of(sockets: Sockets, addresses: tuple[str, ...]) -> dict[str, str]:
    return {address: dial(sockets, V4, address)[0] for address in addresses}


def test_clients_keep_their_endpoints_and_share_them_with_no_other_namespace(where: Node) -> None:
    pod, host = where.sockets(where.pod), where.sockets(where.host)
    of_pod, of_host = endpoints_of(pod, STICKY), endpoints_of(host, STICKY)
    assert of_pod != of_host
    for _ in range(5):
        assert endpoints_of(pod, STICKY) == of_pod
        assert endpoints_of(host, STICKY) == of_host


def test_a_client_that_was_away_for_the_timeout_gets_any_endpoint(where: Node) -> None:
    pod = where.sockets(where.pod)
    before = endpoints_of(pod, BRIEF)
    time.sleep(1.1)
    assert endpoints_of(pod, BRIEF) != before


def test_only_clients_of_a_removed_endpoint_get_another(where: Node) -> None:
    """The others keep theirs, though endpoints move to other slots."""
    pod = where.sockets(where.pod)
    before = endpoints_of(pod, STICKY)
    removed = before[STICKY[0]]
    left = tuple(endpoint for endpoint in REMOTE if endpoint != removed)
    for address in STICKY:
        serve(where, address, left, 10800)
    until(lambda: removed not in endpoints_of(pod, STICKY).values())
    after = endpoints_of(pod, STICKY)
    for address, endpoint in before.items():
        assert after[address] == endpoint or endpoint == removed
