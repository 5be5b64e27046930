"""Rules and sets are read from the kernel as they were written, so that no sync writes them again."""


import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import node_view
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.node import LocalSource, NodeView
from kproxy_ipvs import names, skeleton
from kproxy_ipvs.batch import difference as rules_difference
from kproxy_ipvs.kernel import sets
from kproxy_ipvs.names import SetKind
from kproxy_ipvs.wanted import SetEntry
from kproxy_xtables.tables import Tables
from kproxy_xtables.variant import Variant, find_variants
from tests.core.namespaces import Namespace, namespace

PODS = {Family.IPV4: "10.244.1.0/24", Family.IPV6: "fd00:1::/64"}
STYLES = {
    "network": {},
    "interface": {"local_source": LocalSource(interface="br0")},
    "prefix": {"local_source": LocalSource(interface_prefix="veth")},
    "unknown": {"local_source": None},
    "all": {"masquerade_all": True, "masquerade_bit": 20},
}


def node(family: Family, style: str) -> NodeView:
    return replace(node_view(family=family, pods=PODS[family]), **STYLES[style])  # type: ignore[arg-type]


def written(at: Namespace, tables: Tables, view: NodeView) -> str:
    """Write the skeleton for *view* to *tables*; return the difference found afterwards."""

    def action() -> str:
        sets.create(view.family, names.SETS)
        tables.restore(rules_difference(tables.chains(), skeleton.skeleton(view)))
        return rules_difference(tables.chains(), skeleton.skeleton(view))

    return at.inside(action)


@pytest.mark.parametrize("variant", find_variants(), ids=str)
@pytest.mark.parametrize("family", list(Family))
def test_rules_are_listed_as_written(variant: Variant, family: Family) -> None:
    with namespace() as here:
        for style in STYLES:
            assert written(here, Tables(family, variant), node(family, style)) == "", style


def test_only_the_differing_chain_is_written() -> None:
    with namespace() as here:
        tables = Tables(Family.IPV4, find_variants()[0])
        view = node(Family.IPV4, "network")
        written(here, tables, view)
        here.run(tables.program, "-t", "nat", "-F", "KUBE-LOAD-BALANCER")
        text = here.inside(lambda: rules_difference(tables.chains(), skeleton.skeleton(view)))
        assert [line for line in text.splitlines() if line.startswith((":", "*"))] == [
            "*nat", ":KUBE-LOAD-BALANCER - [0:0]"
        ]  # fmt: skip


@pytest.mark.parametrize("family", list(Family))
def test_entries_are_listed_as_written(family: Family) -> None:
    v4 = family is Family.IPV4
    address, net = ("192.0.2.1", "198.18.0.0/15") if v4 else ("2001:db8::1", "fd00:18::/32")
    elements = [
        SetEntry(names.CLUSTER_IP, f"{address},tcp:80"),
        SetEntry(names.EXTERNAL_IP, f"{address},sctp:80"),
        SetEntry(names.LOOP_BACK, f"{address},udp:53,{address}"),
        SetEntry(names.SOURCE_CIDR, f"{address},tcp:80,{net}"),
        SetEntry(names.SOURCE_CIDR, f"{address},tcp:80,{address}"),
        SetEntry(names.NODE_PORT_SETS[Protocol.TCP][0], "30080"),
        SetEntry(names.IPVS_IPS, address),
        SetEntry(names.SHORT_CIRCUIT, f"{address},tcp:80", 0x6B123456),
    ]
    with namespace() as here:

        def action() -> set[SetEntry]:
            sets.create(family, names.SETS)
            sets.write(family, elements)
            held = sets.read(family)
            return {SetEntry(kind, entry, mark) for kind in held for entry, mark in held[kind].items()}

        assert here.inside(action) == set(elements)
        here.inside(lambda: sets.write(family, (), elements))
        assert here.inside(lambda: sets.read(family)) == {kind: {} for kind in names.SETS}


@pytest.mark.parametrize("family", list(Family))
def test_a_small_set_that_rules_use_is_replaced_by_a_large_one(family: Family) -> None:
    v4 = family is Family.IPV4
    address = "192.0.2.1" if v4 else "2001:db8::1"
    kept = SetEntry(names.SOURCE_CIDR, f"{address},tcp:80,{address}")
    marked = SetEntry(names.SHORT_CIRCUIT, f"{address},tcp:80", 0x6B123456)
    more = [
        SetEntry(names.CLUSTER_IP, f"{address.removesuffix('1')}{2 + at // 60_000},tcp:{at % 60_000 + 1}")
        for at in range(70_000)]  # fmt: skip
    with namespace() as here, pytest.MonkeyPatch.context() as patch:
        tables = Tables(family, find_variants()[0])
        patch.setattr(names, "MOST_ENTRIES", 65_536)
        written(here, tables, node(family, "network"))
        here.inside(lambda: sets.write(family, [kept, marked]))
        with pytest.raises(HostError, match="the set is full"):
            here.inside(lambda: sets.write(family, more))
        patch.undo()

        def widen() -> dict[SetKind, dict[str, int]]:
            sets.widen(family, held := sets.read(family))
            assert sets.read(family) == held
            return held

        held = here.inside(widen)
        assert held[names.SHORT_CIRCUIT] == {marked.entry: marked.mark}
        here.inside(lambda: sets.write(family, more))
        held = here.inside(lambda: sets.read(family))
        assert len(held[names.CLUSTER_IP]) == len(more)
        assert held[names.SOURCE_CIDR] == {kept.entry: 0}


def test_set_in_use_is_not_destroyed() -> None:
    with namespace() as here:
        tables = Tables(Family.IPV4, find_variants()[0])
        written(here, tables, node(Family.IPV4, "network"))
        errors = here.inside(lambda: sets.destroy(["KUBE-CLUSTER-IP", "KUBE-MISSING", "KUBE-6-CLUSTER-IP"]))
        told = {name: str(error) for name, error in errors.items()}
        assert told == {"KUBE-CLUSTER-IP": "a rule uses the set"}
        assert here.inside(lambda: sets.existing([names.CLUSTER_IP])) == ["KUBE-CLUSTER-IP"]
