"""The difference between acknowledged and wanted elements."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_conformance.builders import endpoint, endpoint_slice, node_view, plans, service
from kproxy_core.model.address import Address, format_address
from kproxy_core.model.service import Destination, ServicePortKey
from kproxy_core.nft.elements import Data, Found
from kproxy_core.nft.objects import Chain
from kproxy_core.nft.rules import NFT_GOTO, Verdict, rule_text
from kproxy_core.plan.hashing import HashBy
from kproxy_core.plan.service_plan import ServicePlan
from kproxy_nftables import names
from kproxy_nftables.applied import Applied, Contents, arrange, compare, dict_of, held_elements
from kproxy_nftables.names import parse_template
from kproxy_nftables.settings import Settings
from kproxy_nftables.skeleton import templates, templates_of
from kproxy_nftables.wanted import node_elements

NODE = node_view("node1", pods="10.244.1.0/24", node_port_addresses="192.0.2.1")

SLOTS = st.lists(
    st.integers(0, 12).map(lambda n: Destination(Address(bytes([10, 0, 0, n])), 80)), unique=True
).map(tuple)


@given(SLOTS, SLOTS)
def test_indices_hold_exactly_the_wanted_endpoints(
    old: tuple[Destination, ...], wanted: tuple[Destination, ...]
) -> None:
    assert sorted(arrange(old, wanted)) == sorted(wanted)


@given(SLOTS, SLOTS)
def test_a_remaining_endpoint_keeps_its_index_if_that_exists(
    old: tuple[Destination, ...], wanted: tuple[Destination, ...]
) -> None:
    arranged = arrange(old, wanted)
    for at, where in enumerate(old[: len(wanted)]):
        if where in wanted:
            assert arranged[at] == where


def test_an_endpoint_that_damage_gave_two_indices_has_one() -> None:
    one, other = (Destination(Address(bytes([10, 0, 0, n])), 80) for n in (1, 2))
    assert arrange((one, one), (one, other)) == (one, other)
    assert arrange((one, one), (one,)) == (one,)


@given(st.sets(st.integers(0, 400)), st.lists(st.sets(st.integers(0, 400), max_size=8), max_size=4))
def test_endpoints_among_hundreds_keep_their_indices(first: set[int], steps: list[set[int]]) -> None:
    applied, hosts = Applied(), first
    for step in [set[int](), *steps]:
        hosts = hosts ^ step
        found = [f"10.1.{n // 200}.{n % 200 + 1}" for n in hosts]
        wanted = plans(NODE, service("web"), *([endpoint_slice("web", *found)] if found else []))
        (key,) = wanted
        before = applied.held[key].cluster if key in applied.held else ()
        applied.acknowledge(applied.difference(wanted))
        after = applied.held[key].cluster
        assert sorted(after) == list(wanted[key].cluster)
        staying = [(at, where) for at, where in enumerate(before[: len(after)]) if where in set(after)]
        assert all(after[at] == where for at, where in staying)


def contents_of(applied: Applied) -> dict[tuple[str, bytes], Data]:
    own = [element for held in applied.held.values() for element in held_elements(held)]
    return dict_of([*own, *applied.shared])


@given(SLOTS, SLOTS, st.booleans(), st.booleans())
def test_a_difference_leads_from_one_content_to_the_other(
    old: tuple[Destination, ...], wanted: tuple[Destination, ...], was_local: bool, is_local: bool
) -> None:
    def planned(ends: tuple[Destination, ...], *, local: bool) -> dict[ServicePortKey, ServicePlan]:
        found = [endpoint(format_address(end.address), f"node{1 + end.address[3] % 2}") for end in ends]
        web = service("web", "80@30080", external_ips="192.0.2.9", external_local=local)
        return plans(NODE, web, *([endpoint_slice("web", *found)] if found else []))

    applied = Applied()
    applied.acknowledge(applied.difference(planned(old, local=was_local)))
    contents = contents_of(applied)
    difference = applied.difference(planned(wanted, local=is_local))
    for container, key, _ in difference.deletes:
        del contents[container, key]
    for container, key, value in difference.adds:
        assert (container, key) not in contents
        contents[container, key] = value
    applied.acknowledge(difference)
    assert contents == contents_of(applied)


def plans_with(count: int, *, without: int = -1) -> dict[ServicePortKey, ServicePlan]:
    endpoints = [f"10.244.2.{n}" for n in range(1, count + 1) if n != without]
    return plans(NODE, service(), endpoint_slice("web", *endpoints))


def test_removing_an_endpoint_changes_at_most_five_elements() -> None:
    applied = Applied()
    applied.acknowledge(applied.difference(plans_with(200)))
    for leaving in (1, 100, 200):
        difference = applied.difference(plans_with(200, without=leaving))
        assert len({element[:2] for element in difference.deletes + difference.adds}) <= 5


def test_replacing_an_endpoint_changes_one_element() -> None:
    applied = Applied()
    applied.acknowledge(
        applied.difference(plans(NODE, service(), endpoint_slice("web", "10.0.0.1", "10.0.0.2")))
    )
    difference = applied.difference(plans(NODE, service(), endpoint_slice("web", "10.0.0.9", "10.0.0.2")))
    assert len(difference.adds) == len(difference.deletes) == 1


def test_only_an_acknowledgement_changes_the_state() -> None:
    applied = Applied()
    first = applied.difference(plans_with(3))
    assert applied.difference(plans_with(3)).adds == first.adds


def test_a_shared_element_is_deleted_with_its_last_owner() -> None:
    two_ports = plans(NODE, service("web", "a:80", "b:81"), endpoint_slice("web", ports=("a:80", "b:81")))
    applied = Applied()
    applied.acknowledge(applied.difference(two_ports))
    one, other = two_ports
    first = applied.difference({one: None})
    assert not [e for e in first.deletes if e[0] == "cluster-ips"]
    applied.acknowledge(first)
    assert [e for e in applied.difference({other: None}).deletes if e[0] == "cluster-ips"]


# Any path ends where a restart would -------------------------------------------------


@st.composite
def some_plans(draw: st.DrawFn) -> dict[ServicePortKey, ServicePlan]:
    """Draw the plans of up to four Services of any shape, each with its own addresses, some named twice."""
    found: dict[ServicePortKey, ServicePlan] = {}
    for number in draw(st.sets(st.integers(1, 4))):
        vip, external, balancer = (f"{net}.{number}" for net in ("10.96.0", "198.51.100", "203.0.113"))
        svc = service(
            f"web{number}",
            f"80@3000{number}" if draw(st.booleans()) else "80",
            ip=vip,
            external_ips=draw(st.sampled_from(["", external, f"{external} {balancer} {vip}"])),
            load_balancer_ips=draw(st.sampled_from(["", balancer, f"{vip} {balancer}"])),
            source_ranges="192.0.2.0/24" if draw(st.booleans()) else "",
            affinity=draw(st.sampled_from([0, 0, 10, 20])),
            internal_local=draw(st.booleans()),
            external_local=draw(st.booleans()),
            hash_by=draw(st.sampled_from(["", "", "", "client", "flow"])),
        )
        hosts = draw(st.lists(st.integers(1, 9), max_size=6, unique=True))
        where = [endpoint(f"10.244.{1 + n % 2}.{n}", f"node{1 + n % 2}") for n in hosts]
        weights = draw(st.tuples(*[st.sampled_from([None, None, 0, 1, 3])] * 2))
        pieces = [
            endpoint_slice(f"web{number}", *where[at::2], name=f"web{number}-{at}", weight=weights[at])
            for at in range(2) if where[at::2]]
        found.update(plans(NODE, svc, *pieces))
    return found


def without_index(elements: Sequence[tuple[str, bytes, Found]]) -> set[tuple[str, bytes, object]]:
    """Return elements without the index in endpoint keys, which is arbitrary."""
    return {
        (container, key[:-4] if container.endswith("-endpoints") else key, value)
        for container, key, value in elements
    }


@given(st.lists(some_plans(), min_size=1, max_size=6))
@settings(max_examples=50)  # A table of a hash has a thousand slots.
def test_any_path_ends_in_the_elements_of_a_full_sync(
    states: list[dict[ServicePortKey, ServicePlan]],
) -> None:
    applied = Applied()
    kernel: dict[tuple[str, bytes], object] = {}
    for state in states:
        changed = dict.fromkeys(applied.held) | state
        difference = applied.difference(changed)
        for container, key, _ in difference.deletes:
            del kernel[container, key]
        for container, key, value in difference.adds:
            assert (container, key) not in kernel
            kernel[container, key] = value
        applied.acknowledge(difference)
    fresh = Applied()
    full = fresh.difference(states[-1])
    final = [(container, key, value) for (container, key), value in kernel.items()]
    assert without_index(final) == without_index(full.adds)  # type: ignore[arg-type]
    assert len(final) == len(full.adds)


def weighted(one: int | None, two: int | None, hash_by: HashBy = "") -> dict[ServicePortKey, ServicePlan]:
    web = service("web", hash_by=hash_by)
    slices = endpoint_slice("web", "10.244.2.1", weight=one), endpoint_slice(
        "web", "10.244.2.2", name="web-2", weight=two)
    return plans(NODE, web, *slices)


@pytest.mark.parametrize(("made", "verdict", "slots"), [
    (weighted(None, None), Verdict(NFT_GOTO, "tcp-cluster-2"), "12"),
    (weighted(75, 25), Verdict(NFT_GOTO, "tcp-cluster-4"), "1112"),
    (weighted(0, 25), Verdict(NFT_GOTO, "tcp-cluster-1"), "2"),
    (weighted(0, 0), Verdict(NFT_GOTO, "reject-traffic"), ""),
])
def test_an_endpoint_has_as_many_elements_as_its_weight(
    made: dict[ServicePortKey, ServicePlan], verdict: Verdict, slots: str
) -> None:
    applied = Applied()
    adds = applied.difference(made).adds
    assert [value for container, _, value in adds if container == "vips"] == [verdict]
    found = [value for container, _, value in adds if container == "tcp-vip-endpoints"]
    assert [str(value[3]) for value in found if isinstance(value, bytes)] == list(slots)


@pytest.mark.parametrize(("hash_by", "number"), [
    ("client", "jhash ip saddr mod 1021 seed 0x6b70726f"),
    ("flow", "jhash ip saddr . tcp sport mod 1021 seed 0x6b70726f"),
])
def test_a_hash_selects_a_slot_of_the_table(hash_by: HashBy, number: str) -> None:
    made = weighted(None, None, hash_by)
    (plan,) = made.values()
    (template,) = templates_of([plan])
    (chain,) = templates(NODE, [template])
    assert isinstance(chain, Chain)
    assert chain.name == f"tcp-cluster-1021-by-{hash_by}"
    assert parse_template(chain.name) == template
    wanted = f"dnat ip to ip daddr . tcp dport . {number} map @tcp-vip-endpoints"
    assert rule_text(chain.rules[-1]) == wanted
    held = Applied()
    held.acknowledge(held.difference(made))
    assert held.held[plan.key].cluster == plan.cluster_slots
    (chain,) = templates(NODE, [template], Settings(without_hash=True))
    assert isinstance(chain, Chain)
    assert "numgen random mod 1021" in rule_text(chain.rules[-1])


def test_comparing_with_the_kernel_finds_every_kind_of_difference() -> None:
    a, b, c = b"aaaa", b"bbbb", b"cccc"
    actual: Contents = {"vips": {a: names.DROP, b: Verdict(NFT_GOTO, "tcp-cluster-1")}, "node-ips": {c: None}}
    others = [("vips", a, Verdict(NFT_GOTO, "tcp-cluster-2")), ("vips", c, names.DROP), *node_elements(NODE)]
    _, deletes, adds = compare({}, others, actual)
    assert {e[:2] for e in deletes} == {("vips", a), ("vips", b), ("node-ips", c)}
    assert {e[:2] for e in adds} == {("vips", a), ("vips", c), ("node-ips", bytes([192, 0, 2, 1]))}
