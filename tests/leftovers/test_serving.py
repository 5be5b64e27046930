"""A mode that serves removes the leftovers of kube-proxy in any mode, and keeps shared objects."""

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
    """Return the kernel state of each mode that serves without leftovers."""
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
def test_only_the_state_of_the_serving_mode_remains(
    node: Namespace, undisturbed: dict[str, list[str]], mode: str, left: str
) -> None:
    load(node, left, variant(nft=True))
    assert served(node, mode, undisturbed[mode]) == undisturbed[mode]


@pytest.mark.parametrize("left", ["iptables", "ipvs"])
def test_rules_of_the_unused_variant_are_removed(
    node: Namespace, undisturbed: dict[str, list[str]], left: str
) -> None:
    load(node, left, variant(nft=False))
    assert served(node, "iptables", undisturbed["iptables"]) == undisturbed["iptables"]
