"""The same checks in a kernel with IPVS: run in a guest by `test_ipvs`."""

from collections.abc import Iterator

import pytest

from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_ipvs.batch import PutServer
from kproxy_ipvs.kernel.servers import VirtualServers
from kproxy_ipvs.wanted import Scheduling, ServerKey
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import kproxy
from tests.leftovers.kernel import held, working
from tests.leftovers.kube_proxy import load, load_foreign
from tests.leftovers.serving import served

VIP, THEIRS = (
    ServerKey(Family.IPV4, 0, parse_address(text), Protocol.TCP, 80)
    for text in ("10.96.0.10", "198.51.100.1")
)
LEFT = (("iptables", "nftables", "ipvs 1.14"), ("userspace", "iptables 1.23", "ipvs"))
"""kube-proxy was started in one mode after another."""


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        load_others(made)
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[str]]:
    """Return the kernel state of each mode that serves without leftovers."""
    found: dict[str, list[str]] = {}
    for mode in ("nftables", "iptables", "ipvs", "userspace"):
        with namespace() as made:
            load_others(made)
            found[mode] = served(made, mode)
    return found


def load_others(node: Namespace) -> None:
    """Foreign rules, and a foreign virtual server."""
    load_foreign(node, working())
    node.inside(lambda: make_server(THEIRS))


def load_kube_proxy(node: Namespace, mode: str, *, nft: bool = True) -> None:
    """Load the leftovers of kube-proxy; in ipvs mode with virtual servers and the device."""
    load(node, mode, next(variant for variant in working() if variant.nft is nft))
    if mode.startswith("ipvs"):
        node.ip("link add kube-ipvs0 type dummy", "address add 10.96.0.10/32 dev kube-ipvs0")
        node.inside(lambda: make_server(VIP))


def make_server(key: ServerKey) -> None:
    servers = VirtualServers()
    try:
        servers.write([PutServer(key, Scheduling("rr"), new=True)])
    finally:
        servers.close()


@pytest.mark.parametrize("left", LEFT, ids=" then ".join)
def test_ipvs_keeps_only_its_own_state(
    node: Namespace, undisturbed: dict[str, list[str]], left: tuple[str, ...]
) -> None:
    for mode in left:
        load_kube_proxy(node, mode)
    assert served(node, "ipvs", undisturbed["ipvs"]) == undisturbed["ipvs"]


def test_rules_of_the_unused_variant_are_removed(
    node: Namespace, undisturbed: dict[str, list[str]]
) -> None:
    for mode in ("iptables", "ipvs"):
        load_kube_proxy(node, mode, nft=False)
    assert served(node, "ipvs", undisturbed["ipvs"]) == undisturbed["ipvs"]


@pytest.mark.parametrize("mode", ["nftables", "iptables", "userspace"])
def test_other_modes_remove_virtual_servers_and_their_state(
    node: Namespace, undisturbed: dict[str, list[str]], mode: str
) -> None:
    load_kube_proxy(node, "ipvs")
    assert served(node, mode, undisturbed[mode]) == undisturbed[mode]


@pytest.mark.parametrize("left", ["ipvs", "ipvs 1.14"])
def test_a_clean_up_removes_everything_but_foreign_servers(node: Namespace, left: str) -> None:
    foreign = held(node)
    load_kube_proxy(node, left)
    everything = held(node)
    told = [kproxy("--cleanup", *flags, node=node) for flags in (["--dry-run"], [], [])]
    assert [(done.returncode, done.stderr) for done in told] == [(0, "")] * 3
    assert len(everything) > len(foreign)
    assert held(node) == foreign
    dry, wet, again = (done.stdout for done in told)
    assert dry.replace(" would be ", " ") == wet
    assert again == ""
