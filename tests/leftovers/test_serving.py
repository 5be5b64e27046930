"""A mode that serves removes what kube-proxy left in any mode, and keeps all it shares with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy_xtables.variant import Variant
from tests.core.namespaces import Namespace, namespace
from tests.leftovers.kernel import working
from tests.leftovers.kube_proxy import KUBE_PROXYS, load, load_foreign
from tests.leftovers.serving import served

SERVING = ("nftables", "iptables", "userspace")


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        load_foreign(made, working())
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[str]]:
    """What is in the kernel where a mode serves and nothing was left, by mode."""
    found: dict[str, list[str]] = {}
    for mode in SERVING:
        with namespace() as made:
            load_foreign(made, working())
            found[mode] = served(made, mode)
    return found


def variant(*, nft: bool) -> Variant:
    return next(found for found in working() if found.nft is nft)


@pytest.mark.parametrize("left", KUBE_PROXYS)
@pytest.mark.parametrize("mode", SERVING)
def test_only_what_the_mode_serves_with_is_left(
    node: Namespace, undisturbed: dict[str, list[str]], mode: str, left: str
) -> None:
    load(node, left, variant(nft=True))
    assert served(node, mode, undisturbed[mode]) == undisturbed[mode]


@pytest.mark.parametrize("left", ["iptables", "ipvs"])
def test_rules_in_the_interface_that_the_node_does_not_use_go(
    node: Namespace, undisturbed: dict[str, list[str]], left: str
) -> None:
    load(node, left, variant(nft=False))
    assert served(node, "iptables", undisturbed["iptables"]) == undisturbed["iptables"]
