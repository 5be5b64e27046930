"""Whatever another process puts into the table, a full sync shows it in its preview, and removes it."""

import re
import subprocess
from collections.abc import Iterator
from types import ModuleType
from typing import Never

import pytest

from kproxy_conformance.checks.privileges import without_privileges
from kproxy_core.contract.errors import SyncFailed, TrustLost
from kproxy_core.contract.values import BackendSettings, Scope, Update
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.netlink.messages import (
    NLM_F_CREATE,
    Malformed,
    NetlinkRequest,
    attribute,
    nested,
    payload,
    text_attribute,
)
from kproxy_core.nft import listing, rules
from kproxy_core.nft.elements import CATCH_ALL
from kproxy_core.nft.messages import DELSETELEM, KIND, NEWSETELEM, Command
from kproxy_core.nft.objects import Table
from kproxy_core.nft.rules import Expression, limit
from kproxy_nftables import names, skeleton
from kproxy_nftables.backend import NftablesBackend
from kproxy_nftables.kernel import Kernel
from kproxy_nftables.wanted import vip_key

from .test_kernel import NODES, resync, rich

pytestmark = pytest.mark.usefixtures("netns")

ADDRESSES = {
    Family.IPV4: {"f": "ip", "vip": "10.96.0.1", "pod": "10.244.1.1", "foreign": "198.51.100.1"},
    Family.IPV6: {"f": "ip6", "vip": "fd00:96::1", "pod": "fd00:1::1", "foreign": "2001:db8:f::1"},
}

ELEMENTS = {
    "catch-all in a verdict map": "add element {f} kproxy vips {{ * : drop }}",
    "catch-all in a map of node ports": "add element {f} kproxy nodeports {{ * : drop }}",
    "catch-all in a map of endpoints":
        "add element {f} kproxy tcp-vip-endpoints {{ * : {foreign} . 80 }}",
    "catch-all in a set": "add element {f} kproxy cluster-ips {{ * }}",
    "catch-all in a set of pairs": "add element {f} kproxy hairpins {{ * }}",
    "catch-all in a set that rules fill": "add element {f} kproxy connections {{ * timeout 1h }}",
    "catch-all among pinned clients": "add element {f} kproxy AFFINITY {{ * timeout 1h : {pod} }}",
    "catch-alls everywhere":
        "add element {f} kproxy vips {{ * : drop }}; add element {f} kproxy cluster-ips {{ * }}; "
        "add element {f} kproxy connections {{ * timeout 1h }}",
    "element": "add element {f} kproxy vips {{ {foreign} . tcp . 80 : drop }}",
    "elements of another protocol":
        "add element {f} kproxy vips {{ {foreign} . icmp . 80 : drop }}; "
        "add element {f} kproxy nodeports {{ gre . 80 : drop }}",
    "element with a comment": 'add element {f} kproxy node-ips {{ {foreign} comment "ours" }}',
    "network": "add element {f} kproxy service-cidrs {{ {foreign} }}",
}  # fmt: skip
"""Elements that `nft` adds."""

OBJECTS = {
    "base chain with an anonymous chain":
        "add chain {f} kproxy x {{ type filter hook forward priority 0; }}; "
        "add rule {f} kproxy x meta mark 7 jump {{ drop; }}",
    "anonymous chain, set and map":
        "add chain {f} kproxy x {{ type filter hook forward priority 0; }}; "
        "add rule {f} kproxy x meta mark {{ 7, 8 }} jump {{ tcp dport vmap {{ 1 : drop, 2 : accept }}; }}",
    "anonymous chain in a chain of ours": "add rule {f} kproxy services meta mark 7 jump {{ drop; }}",
    "chain to which a map leads":
        "add chain {f} kproxy x; add element {f} kproxy vips {{ {foreign} . tcp . 80 : goto x }}",
    "chains that lead to each other and to ours":
        "add chain {f} kproxy x; add chain {f} kproxy y; add rule {f} kproxy x jump y; "
        "add rule {f} kproxy y jump services; add rule {f} kproxy y jump pin",
    "chain of which ours is a part": "add chain {f} kproxy x; add rule {f} kproxy services goto x",
    "map and set": "add map {f} kproxy x {{ type mark : verdict; }}; add set {f} kproxy y {{ type mark; "
                   "flags interval; }}; add element {f} kproxy x {{ 7 : drop }}",
    "map with a name like an anonymous one": "add map {f} kproxy __map7 {{ type mark : verdict; }}",
    "counter and quota with rules and a map":
        "add counter {f} kproxy x; add quota {f} kproxy y {{ over 25 mbytes; }}; "
        "add rule {f} kproxy services counter name x; add map {f} kproxy z {{ type mark : counter; }}; "
        "add element {f} kproxy z {{ 7 : \"x\" }}",
    "limit": "add limit {f} kproxy x {{ rate 1/second; }}",
    "policy": "add chain {f} kproxy filter-forward {{ policy drop; }}",
    "dormant": "add table {f} kproxy {{ flags dormant; }}",
    "map of another type":
        "flush chain {f} kproxy services; delete map {f} kproxy vips; "
        "add map {f} kproxy vips {{ type mark : verdict; }}; add element {f} kproxy vips {{ 7 : drop }}",
    "map with other flags":
        "flush chain {f} kproxy services; delete map {f} kproxy vips; add map {f} kproxy vips "
        "{{ type {f}v_addr . inet_proto . inet_service : verdict; flags timeout; }}; "
        "add element {f} kproxy vips {{ * timeout 1h : drop }}",
    "set of intervals instead of one of addresses":
        "flush chain {f} kproxy cluster-ips-check; delete set {f} kproxy cluster-ips; "
        "add set {f} kproxy cluster-ips {{ type {f}v_addr; flags interval; }}; "
        "add element {f} kproxy cluster-ips {{ {foreign} }}",
    "base chain at another hook":
        "flush chain {f} kproxy filter-output; delete chain {f} kproxy filter-output; "
        "add chain {f} kproxy filter-output {{ type filter hook input priority 0; policy drop; }}",
    "table without anything": "delete table {f} kproxy; add table {f} kproxy",
}  # fmt: skip
"""Objects and rules that `nft` adds."""


def listed(family: Family) -> list[str]:
    """Return the words of the table in an order that does not depend on the kernel's."""
    found = subprocess.run(
        ["nft", "-s", "list", "table", family.ip, "kproxy"], check=True, capture_output=True, text=True)
    return sorted(part.strip() for part in re.split(r"[,\n{}]", found.stdout))


def stateful(family: Family, name: str, key: bytes, value: bytes, expression: Expression) -> None:
    """Replace an element of a set or a map by one with an *expression*, which nft 1.0.6 cannot write."""
    of = text_attribute(1, "kproxy") + text_attribute(2, name)
    plain = nested(1, attribute(1, key))
    added = nested(1, plain, value, nested(11, expression.encode()))
    with Kernel() as kernel:
        kernel.run([
            Command("", NetlinkRequest(kind, NLM_F_CREATE, payload(family, of, nested(3, element))))
            for kind, element in ((DELSETELEM, nested(1, plain)), (NEWSETELEM, added))
        ])  # fmt: skip


def damage(family: Family, script: str) -> None:
    text = script.format(**ADDRESSES[family]).replace("ipv_addr", "ipv4_addr").replace("ip6v_", "ipv6_")
    kernel = subprocess.run(
        ["nft", "list", "table", family.ip, "kproxy"], check=True, capture_output=True, text=True).stdout
    for word, pattern in (("AFFINITY", r"map (affinity-\S+web2\S+) "), (" pin", r"chain (pin-\S+web2\S+) ")):
        if word in text:
            found = re.search(pattern, kernel)
            assert found is not None
            text = text.replace(word, f"{word[:-len(word.lstrip())]}{found[1]}")
    subprocess.run(["nft", text], check=True)


@pytest.fixture
def backend(netns: None) -> Iterator[NftablesBackend]:
    made = NftablesBackend(SETTINGS)
    yield made
    made.close()


SETTINGS = BackendSettings(families=tuple(Family), count_traffic=True)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize("script", [
    pytest.param(text, id=name) for name, text in (ELEMENTS | OBJECTS).items()])
def test_foreign_contents_are_shown_and_removed(
    backend: NftablesBackend, family: Family, script: str, restarted: bool
) -> None:
    wanted, node = rich(family), NODES[family]
    update = Update(family, Scope.RESYNC, node, dict(wanted), wanted)
    resync(backend, wanted, node)
    before = listed(family)
    damage(family, script)
    assert listed(family) != before
    assert backend.preview(update).operations > 0
    backend.frontends(family)  # `kproxy diff` asks for them.
    if restarted:
        backend.close()
        backend = NftablesBackend(SETTINGS)
    assert resync(backend, wanted, node).operations > 0
    assert listed(family) == before
    assert backend.preview(update).operations == 0
    assert resync(backend, wanted, node).operations == 0
    backend.close()


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_elements_that_match_at_times_only_are_replaced(backend: NftablesBackend, family: Family) -> None:
    wanted, node = rich(family), NODES[family]
    resync(backend, wanted, node)
    before = listed(family)
    vip = parse_address(ADDRESSES[family]["vip"])
    verdict = nested(2, nested(2, attribute(1, bytes(4))))
    for name, key, value in (
        (names.CLUSTER_IPS, vip, b""), (names.VIPS, vip_key(vip, Protocol.TCP, 80), verdict),
    ):  # fmt: skip
        for expression in (limit(1).expressions[0], Expression("counter", {})):
            stateful(family, name, key, value, expression)
            assert listed(family) != before
            assert resync(backend, wanted, node).operations == 2
            assert listed(family) == before


def test_a_catch_all_among_networks_is_removed(backend: NftablesBackend) -> None:
    """nft 1.0.6 crashes on one."""
    node = NODES[Family.IPV4]
    resync(backend, {}, node)
    before = listed(Family.IPV4)
    with Kernel() as kernel:
        table = Table(Family.IPV4, names.TABLE)
        kernel.run(list(table.add_elements(skeleton.service_cidrs(node), [CATCH_ALL])))
    assert resync(backend, {}, node).operations > 0
    assert listed(Family.IPV4) == before


@pytest.mark.parametrize("script", [pytest.param(text, id=name) for name, text in ELEMENTS.items()])
def test_a_preview_is_what_nft_takes(backend: NftablesBackend, script: str) -> None:
    wanted, node, family = rich(), NODES[Family.IPV4], Family.IPV4
    resync(backend, wanted, node)
    before = listed(family)
    damage(family, script)
    text = backend.preview(Update(family, Scope.RESYNC, node, dict(wanted), wanted)).transaction
    assert subprocess.run(["nft", "-f", "-"], input=text, text=True, check=False).returncode == 0
    # Clients that are pinned are left out of a preview.
    assert listed(family) == before or "AFFINITY" in script


def test_a_chain_whose_name_is_no_text_ends_with_its_table(backend: NftablesBackend) -> None:
    """It cannot be deleted by name: the second attempt replaces the table."""
    wanted, node, family = rich(), NODES[Family.IPV4], Family.IPV4
    resync(backend, wanted, node)
    before = listed(family)
    named = text_attribute(1, "kproxy") + attribute(3, b"\xff\xfe\0")
    with Kernel() as kernel:
        kernel.run([Command("", NetlinkRequest(KIND | 3, NLM_F_CREATE, payload(family, named)))])
        with pytest.raises(TrustLost, match="No such file or directory"):
            resync(backend, wanted, node)
        assert resync(backend, wanted, node).operations > 0
    assert listed(family) == before
    assert resync(backend, wanted, node).operations == 0


@pytest.mark.parametrize(("module", "parser"), [(listing, "parse_plain"), (rules, "parse_expressions")])
def test_a_table_that_cannot_be_read_is_replaced(
    backend: NftablesBackend, module: ModuleType, parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, node, family = rich(), NODES[Family.IPV4], Family.IPV4
    resync(backend, wanted, node)
    before = listed(family)
    damage(family, "add element {f} kproxy vips {{ {foreign} . tcp . 80 : drop }}")

    def unreadable(*_: object) -> Never:
        raise Malformed("an element of a kernel to come")

    with monkeypatch.context() as patched:
        patched.setattr(module, parser, unreadable)
        assert backend.preview(Update(family, Scope.RESYNC, node, dict(wanted), wanted)).operations > 0
        assert resync(backend, wanted, node).operations > 0
    assert listed(family) == before
    assert resync(backend, wanted, node).operations == 0


def test_without_a_table_the_kernels_refusal_is_told(backend: NftablesBackend) -> None:
    with without_privileges(), pytest.raises(SyncFailed, match="Operation not permitted"):
        resync(backend, rich())
