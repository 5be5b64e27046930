"""The addresses of the node that serve node ports."""

from collections.abc import Collection
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_conformance.builders import addresses, cidrs
from kproxy_core.config.settings import parse_node_port_addresses
from kproxy_core.model.address import Address, Cidr, Family, family_of, is_loopback
from kproxy_core.model.node import NodePortAddresses
from kproxy_core.plan.service_plan import (
    NodePortSelection,
    includes_loopback,
    names_loopback,
    select_node_port_addresses,
)

HERE = addresses("127.0.0.1 ::1 172.19.0.2 172.18.0.2 172.18.0.10 fd00::2 fe80::1")


class Choice(NamedTuple):
    """What is configured, and the node's own addresses."""

    wanted: NodePortAddresses
    own: tuple[Address, ...] = ()

    def among(self, here: Collection[Address], family: Family) -> NodePortSelection:
        own = next((address for address in self.own if family_of(address) is family), None)
        return select_node_port_addresses(self.wanted, own, here, family)


EVERYWHERE = Choice(())


def within(text: str) -> Choice:
    return Choice(cidrs(text))


def primary(text: str) -> Choice:
    return Choice(("primary",), addresses(text))


def mixture(text: str, own: str) -> Choice:
    """What the words in *text* mean in a configuration, on a node whose own addresses are *own*."""
    return Choice(parse_node_port_addresses(text.split()), addresses(own))


@pytest.mark.parametrize(("choice", "family", "served"), [
    (within("172.18.0.0/24"), Family.IPV4, "172.18.0.2 172.18.0.10"),
    (within("172.18.0.10/32 172.18.0.0/24 172.19.0.0/16"), Family.IPV4, "172.18.0.2 172.18.0.10 172.19.0.2"),
    (within("172.18.0.0/24 fd00::/64"), Family.IPV6, "fd00::2"),
    (within("fe80::/10"), Family.IPV6, "fe80::1"),
    (within("127.0.0.0/8 172.18.0.2/32"), Family.IPV4, "172.18.0.2"),
    (primary("172.18.0.10 fd00::2"), Family.IPV4, "172.18.0.10"),
    (primary("172.18.0.10 fd00::2"), Family.IPV6, "fd00::2"),
    (mixture("primary localhost", "172.18.0.10 fd00::2"), Family.IPV4, "172.18.0.10"),
    (mixture("primary localhost", "172.18.0.10 fd00::2"), Family.IPV6, "fd00::2"),
    (mixture("172.19.0.0/16 primary", "172.18.0.10"), Family.IPV4, "172.18.0.10 172.19.0.2"),
    (mixture("172.19.0.0/16 primary", "fd00::2"), Family.IPV4, "172.19.0.2"),
    (mixture("172.19.0.0/16 primary", "fd00::2"), Family.IPV6, "fd00::2"),
])
def test_chosen_addresses(choice: Choice, family: Family, served: str) -> None:
    selection = choice.among(HERE, family)
    assert selection == (tuple(sorted(addresses(served))), False, "")


@pytest.mark.parametrize("choice", [
    EVERYWHERE, within("0.0.0.0/0 ::/0"), within("172.18.0.0/24 0.0.0.0/0 fd00::/64 ::/0"),
    mixture("all", ""), mixture("primary all localhost", ""), mixture("10.0.0.0/8 all", "172.18.0.10"),
])
@pytest.mark.parametrize("family", Family)
def test_anywhere(choice: Choice, family: Family) -> None:
    all_here = tuple(sorted(a for a in HERE if family_of(a) is family and not is_loopback(a)))
    assert choice.among(HERE, family) == (all_here, True, "")


@pytest.mark.parametrize(("choice", "family", "included"), [
    (EVERYWHERE, Family.IPV4, True),
    (EVERYWHERE, Family.IPV6, True),
    (within("0.0.0.0/0"), Family.IPV4, True),
    (within("0.0.0.0/0"), Family.IPV6, False),
    (within("172.18.0.0/24 127.0.0.0/8"), Family.IPV4, True),
    (within("127.0.0.1/32"), Family.IPV4, True),
    (within("172.18.0.0/24 ::1/128"), Family.IPV4, False),
    (within("172.18.0.0/24 ::1/128"), Family.IPV6, True),
    (within("fd00::/64"), Family.IPV6, False),
    (primary("172.18.0.2"), Family.IPV4, False),
    (primary("127.0.0.1"), Family.IPV4, False),
    *((mixture(words, "172.18.0.2 fd00::2"), family, True)
      for words in ("localhost", "primary localhost", "172.18.0.0/24 localhost", "all") for family in Family),
    (mixture("primary 172.18.0.0/24", "172.18.0.2"), Family.IPV4, False),
    (mixture("primary 127.0.0.0/8", "172.18.0.2"), Family.IPV4, True),
    (mixture("primary 127.0.0.0/8", "172.18.0.2"), Family.IPV6, False),
])
def test_loopback_is_for_modes_that_can_serve_it(
    choice: Choice, family: Family, included: bool
) -> None:
    assert includes_loopback(choice.wanted, family) is included


@pytest.mark.parametrize(("choice", "families"), [
    (EVERYWHERE, ()),
    (mixture("all", ""), ()),
    (mixture("primary all", ""), ()),
    (within("0.0.0.0/0"), ()),
    (mixture("primary", "127.0.0.1"), ()),
    (within("126.0.0.0/8"), ()),
    (mixture("localhost", ""), (Family.IPV4, Family.IPV6)),
    (mixture("all localhost", ""), (Family.IPV4, Family.IPV6)),
    (mixture("primary 127.0.0.1/32", ""), (Family.IPV4,)),
    (mixture("0.0.0.0/0 ::1/128", ""), (Family.IPV6,)),
    (within("126.0.0.0/7"), (Family.IPV4,)),
])
def test_relays_need_loopback_by_name(choice: Choice, families: tuple[Family, ...]) -> None:
    """As in KEP-6032: all addresses of a node are no request for relays."""
    assert tuple(family for family in Family if names_loopback(choice.wanted, family)) == families


@pytest.mark.parametrize(("choice", "family", "problem"), [
    (primary(""), Family.IPV4, "the node's own IPv4 address is not known"),
    (primary("172.18.0.2"), Family.IPV6, "the node's own IPv6 address is not known"),
    (within("172.18.0.0/24"), Family.IPV6, "nodePortAddresses has no IPv6 network"),
    (within("::/0"), Family.IPV4, "nodePortAddresses has no IPv4 network"),
    (within("10.0.0.0/8 1.0.0.0/8"), Family.IPV4, "no address of this node is in 10.0.0.0/8, 1.0.0.0/8"),
    (within("127.0.0.0/8"), Family.IPV4, "no address of this node is in 127.0.0.0/8"),
    (primary("172.18.0.3"), Family.IPV4, "no address of this node is in 172.18.0.3/32"),
    (mixture("localhost", "172.18.0.2"), Family.IPV4, "no address of this node is in 127.0.0.0/8"),
    (mixture("localhost primary", ""), Family.IPV4, "the node's own IPv4 address is not known"),
    (mixture("10.0.0.0/8 primary", ""), Family.IPV6, "the node's own IPv6 address is not known"),
    (mixture("10.0.0.0/8 primary", "172.18.0.3"), Family.IPV4,
     "no address of this node is in 10.0.0.0/8, 172.18.0.3/32"),
])
def test_a_selection_of_no_address_has_a_reason(choice: Choice, family: Family, problem: str) -> None:
    assert choice.among(HERE, family) == ((), False, problem)


packed = st.one_of(st.binary(min_size=4, max_size=4), st.binary(min_size=16, max_size=16)).map(Address)
networks = st.builds(
    lambda address, bits: Cidr(address, min(bits, len(address) * 8)), packed, st.sampled_from([32, 128])
)
choices = st.one_of(
    st.just(EVERYWHERE),
    st.lists(networks, min_size=1, max_size=3).map(lambda found: Choice(tuple(found))),
    st.builds(
        lambda found, own: Choice(("primary", *found), tuple(own)),
        st.lists(networks, max_size=2), st.lists(packed, max_size=3),
    ),
)


@given(choices, st.frozensets(packed), st.sampled_from(Family))
def test_only_requested_addresses_are_selected(
    choice: Choice, here: frozenset[Address], family: Family
) -> None:
    named = {*choice.own, *(network.network for network in choice.wanted if network != "primary")}
    selection = choice.among(here | named, family)
    assert all(family_of(a) is family and not is_loopback(a) for a in selection.addresses)
    assert selection.anywhere or set(selection.addresses) <= named
    assert selection.anywhere == (choice == EVERYWHERE)
    # Somewhere, or a reason why nowhere.
    assert bool(selection.anywhere or selection.addresses) != bool(selection.problem)
