"""The map elements that decide for local sockets, in front of the base mode's rules."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kproxy_conformance.builders import full_update
from kproxy_conformance.checks.features import ADDRESSES, everything
from kproxy_core.contract.values import KernelSide
from kproxy_core.model.address import Family
from kproxy_core.plan.fate import Origin, Outcome
from kproxy_ebpf.explain import explain
from kproxy_ebpf.family import FamilyState
from kproxy_ebpf.kernel.maps import Kernel, pinned_maps
from kproxy_ebpf.kernel.programs import Compiled
from kproxy_ebpf.settings import Settings
from tests.plugins.explained import agrees, decided, questions

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def kernel(settings: Settings, compiled: Compiled, family: Family) -> Iterator[Kernel]:
    """The maps with every feature's elements."""
    made = Kernel(settings)
    made.open(compiled)
    state, update = FamilyState(family, made), full_update(ADDRESSES[family].view(), everything(family))
    state.write(update, state.withdraw(update))
    yield made
    made.close()


@FAMILIES
def test_maps_and_rules_decide_together_as_the_plans_say(
    family: Family, kernel: Kernel, settings: Settings
) -> None:
    asked = questions(family)
    rules = [KernelSide((), decided(question)) for question in asked]
    with pinned_maps(settings) as maps:
        assert maps is not None
        for source in (maps, None):
            sides = explain(asked, rules, settings, source)
            for question, side in zip(asked, sides, strict=True):
                assert agrees(question, side), (question, side)
            by_maps = [q.packet.origin for q, side in zip(asked, sides, strict=True) if side.objects]
            assert set(by_maps) == {Origin.POD, Origin.NODE}


@FAMILIES
def test_pods_that_the_rules_cannot_recognise_are_left_to_them_by_policy_local(
    family: Family, kernel: Kernel, settings: Settings
) -> None:
    asked = [replace(q, node=replace(q.node, local_source=None)) for q in questions(family)
             if q.plan is not None and q.plan.external_policy_local]  # fmt: skip
    rules = [KernelSide((), decided(question)) for question in asked]
    with pinned_maps(settings) as maps:
        assert maps is not None
        for source in (maps, None):
            sides = explain(asked, rules, settings._replace(clients="all"), source)
            assert all(agrees(question, side) for question, side in zip(asked, sides, strict=True))


@pytest.mark.parametrize("family", [Family.IPV4])
def test_an_endpoint_that_is_missing_in_the_maps_is_shown(
    family: Family, kernel: Kernel, settings: Settings
) -> None:
    asked = [q for q in questions(family) if q.packet.origin is Origin.NODE
             and decided(q).outcome is Outcome.FORWARDED][:1]  # fmt: skip
    contents = kernel.contents(family)
    kernel.replace("slots", contents["slots"], {})
    with pinned_maps(settings) as maps:
        (side,) = explain(asked, [KernelSide((), decided(asked[0]))], settings, maps)
    assert not agrees(asked[0], side)
    assert any("missing" in item.text for item in side.objects)
