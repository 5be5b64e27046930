"""The chain in kube-proxy's tables by which Calico's Felix tells that Services are served by nf_tables."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kproxy_core.linux.rulesets import MARKER
from kproxy_core.model.address import Family
from kproxy_core.nft.objects import OWNER, Table
from kproxy_core.nft.transaction import RulesetSocket
from tests.core.golden import golden
from tests.core.namespaces import Namespace, namespace
from tests.core.processes import Proxy, kproxy, running
from tests.harm.room import repeated
from tests.leftovers.kernel import working
from tests.leftovers.kube_proxy import load
from tests.patience import PATIENCE

TABLES = ["ip kube-proxy", "ip6 kube-proxy"]
ONLY_MARKER = {table: [MARKER] for table in TABLES}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Namespace]:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    with namespace() as made:
        yield made


@pytest.fixture
def serving(node: Namespace, tmp_path: Path) -> Callable[..., AbstractContextManager[Proxy]]:
    """Start a kproxy with the option of that value, and wait until it has taken over."""

    @contextmanager
    def serve(*, marked: object = True) -> Iterator[Proxy]:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
            "mode": "nftables", "kproxy": {
                "stateDirectory": str(tmp_path / "state"),
                "backendOptions": {"nftables": {"calicoMarker": marked}}},
        }))  # fmt: skip
        manifests = golden("iptables/loadbalancer-source-ranges-ipv4/objects.yaml").parent
        with running(
            node, f"--config={config}", f"--manifests={manifests}", "--hostname-override=kc-node"
        ) as proxy:
            proxy.await_health()
            yield proxy

    return serve


def chains(node: Namespace) -> dict[str, list[str]]:
    """Return the chains in kube-proxy's tables, listed as Felix does; an empty table is not among them."""
    found: dict[str, list[str]] = {}
    for family in ("ip", "ip6"):
        for each in json.loads(node.run("nft", "-j", "list", "chains", family))["nftables"]:
            if "chain" in each and each["chain"]["table"] == "kube-proxy":
                found.setdefault(f"{family} kube-proxy", []).append(each["chain"]["name"])
    return found


def await_chains(node: Namespace, expected: dict[str, list[str]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while (found := chains(node)) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@contextmanager
def never_without(node: Namespace) -> Iterator[None]:
    """Look all the time, as Felix does every 15 s: a chain is in a table of either family."""
    missed: list[bool] = []

    def look() -> None:
        tables = [connection.tables(family).get("kube-proxy") for family in Family]
        missed.append(not any(table and table.chains for table in tables))

    with node.inside(RulesetSocket.open) as connection, repeated(look, 0.0):
        yield
    assert set(missed) == {False}


def test_there_is_a_chain_before_the_takeover_and_after(
    node: Namespace, serving: Callable[..., AbstractContextManager[Proxy]]
) -> None:
    load(node, "nftables", working()[0])
    assert MARKER not in chains(node)[TABLES[0]]
    with never_without(node), serving():
        await_chains(node, ONLY_MARKER)
    with never_without(node):
        with serving():
            assert chains(node) == ONLY_MARKER
        assert chains(node) == ONLY_MARKER
    assert node.run("nft", "list", "table", "ip", "kube-proxy").split() == [
        "table", "ip", "kube-proxy", "{", "chain", MARKER, "{", "}", "}"]


def test_it_is_created_where_there_was_no_kube_proxy_and_again_when_deleted(
    node: Namespace, serving: Callable[..., AbstractContextManager[Proxy]]
) -> None:
    with serving():
        assert chains(node) == ONLY_MARKER
        for damage in ("delete table ip kube-proxy", f"delete chain ip6 kube-proxy {MARKER}",
                       "delete table ip kube-proxy; delete table ip6 kube-proxy"):
            node.nft(damage)
            await_chains(node, ONLY_MARKER)


def test_it_leaves_with_the_option_the_mode_and_the_rules(
    node: Namespace, serving: Callable[..., AbstractContextManager[Proxy]]
) -> None:
    with serving():
        assert chains(node) == ONLY_MARKER
        assert kproxy("diff", node=node).returncode == 0
        switched = kproxy("switch", "iptables", node=node)
        assert switched.returncode == 0, switched.stderr
        await_chains(node, {})
        assert kproxy("switch", "nftables", node=node).returncode == 0
        await_chains(node, ONLY_MARKER)
    with serving(marked=False):
        await_chains(node, {})
    with serving():
        assert chains(node) == ONLY_MARKER
    done = kproxy("--cleanup", node=node)
    assert done.returncode == 0
    assert chains(node) == {}


def test_kube_proxy_returns_to_its_table(
    node: Namespace, serving: Callable[..., AbstractContextManager[Proxy]]
) -> None:
    """Its rules are left as they are when the marker is deleted."""
    with serving():
        assert chains(node) == ONLY_MARKER
    kube_proxys = "; ".join(
        f"add chain {table} {chain}" for table in TABLES for chain in ("services", "masquerading"))
    node.nft(kube_proxys)
    both = chains(node)
    assert all(sorted(of_table) == [MARKER, "masquerading", "services"] for of_table in both.values())
    told = kproxy("--cleanup", "--own-only", node=node)
    assert (told.returncode, told.stderr) == (0, "")
    assert [f"chain {MARKER} of table {table}" in told.stdout for table in TABLES] == [True, True]
    assert chains(node) == {table: ["services", "masquerading"] for table in TABLES}


def test_a_table_of_another_owner_is_a_problem_until_it_ends(
    node: Namespace, serving: Callable[..., AbstractContextManager[Proxy]]
) -> None:
    """Services are served meanwhile."""
    with node.inside(RulesetSocket.open) as owner:
        owner.run([Table(Family.IPV4, "kube-proxy", flags=OWNER).create()])
        with serving() as proxy:
            status, body = proxy.health()
            assert status == 200
            assert "calicoMarker is not in effect" in body
            assert chains(node) == {TABLES[1]: [MARKER]}
            owner.close()
            await_chains(node, ONLY_MARKER)


def test_the_doctor_misses_it_beside_calico(
    node: Namespace, serving: Callable[..., AbstractContextManager[Proxy]]
) -> None:
    def checks() -> set[str]:
        found = json.loads(kproxy("doctor", "-o", "json", node=node).stdout)
        return {each["check"] for each in found["findings"]} & {"calico", "second-proxy"}

    node.nft("table ip calico { chain filter-FORWARD { type filter hook forward priority 0; }; }")
    assert checks() == set()
    with serving(marked=False):
        assert checks() == {"calico"}
    with serving():
        assert checks() == set()
        node.nft("add chain ip kube-proxy services")
        assert checks() == {"second-proxy"}


def test_a_wrong_value_is_named(serving: Callable[..., AbstractContextManager[Proxy]]) -> None:
    with pytest.raises(AssertionError, match=r"nftables\.calicoMarker"), serving(marked="yes"):
        pass
