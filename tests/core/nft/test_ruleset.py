"""The ruleset that the kernel lists, as the interpreter reads it."""

from typing import NamedTuple
from unittest.mock import patch

import pytest

from kproxy_core.model.address import Family, Protocol, format_address, parse_address
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.interpret import Fate, Program
from kproxy_core.nft.messages import GETSETELEM
from kproxy_core.nft.packet import NO_INTERFACE, RTN_UNICAST, Flow, Interface, Node, Packet, Route, Seen
from kproxy_core.nft.ruleset import ListedRuleset
from tests.core.namespaces import namespace

FORWARD = "type filter hook forward priority 0;"
MANY = ", ".join(format_address(parse_address(f"10.{at >> 8}.{at & 255}.1")) for at in range(5000))


class Case(NamedTuple):
    of: str
    """The set or map ``m``."""
    rule: str
    drops: bool
    """It drops packets of TCP from 10.0.7.1 to 10.9.9.9, port 80."""
    reads_all: bool = False


CASES = {
    "an element of many": Case(
        f"set m {{ type ipv4_addr; elements = {{ {MANY} }}; }}", "ip saddr @m drop", drops=True),
    "none of many": Case(
        f"set m {{ type ipv4_addr; elements = {{ {MANY} }}; }}", "ip daddr @m drop", drops=False),
    "all others": Case(
        f"set m {{ type ipv4_addr; elements = {{ {MANY} }}; }}", "ip daddr != @m drop", drops=True),
    "a port, for which the kernel keeps bits": Case(
        "set m { type inet_service; elements = { 22, 80 }; }", "tcp dport @m drop", drops=True),
    "several parts": Case(
        "set m { typeof ip daddr . tcp dport; elements = { 10.9.9.9 . 79, 10.9.9.9 . 80 }; }",
        "ip daddr . tcp dport @m drop", drops=True),
    "a verdict": Case(
        "map m { type ipv4_addr : verdict; elements = { 10.9.9.9 : drop, * : accept }; }",
        "ip daddr vmap @m", drops=True),
    "a verdict for all other keys": Case(
        "map m { type ipv4_addr : verdict; elements = { 10.9.9.8 : accept, * : drop }; }",
        "ip daddr vmap @m", drops=True),
    "an element with a timeout": Case(
        "set m { type ipv4_addr; flags timeout; elements = { 10.9.9.9 timeout 1h }; }",
        "ip daddr @m drop", drops=True),
    "an interval": Case(
        "set m { type ipv4_addr; flags interval; elements = { 10.9.0.0/16, 10.7.0.0/16 }; }",
        "ip daddr @m drop", drops=True, reads_all=True),
    "a key of which a part is not known": Case(
        "set m { typeof ip daddr . ip ttl; elements = { 10.9.9.8 . 64 }; }",
        "ip daddr . ip ttl @m drop", drops=False, reads_all=True),
}


@pytest.mark.parametrize("name", CASES)
def test_elements_are_read_one_by_one_where_a_key_finds_one(name: str) -> None:
    case = CASES[name]
    flow = Flow(parse_address("10.0.7.1"), parse_address("10.9.9.9"), 20000, 80)
    seen = Seen(
        Packet.of(Family.IPV4, Protocol.TCP, flow), Interface("c0", 2), NO_INTERFACE, is_from_node=False)

    def fates() -> set[Fate]:
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            node = Node(lambda to, mark: Route(RTN_UNICAST, Interface("s0", 3)))
            ends = Program(ListedRuleset(sock)).interpret(seen, node).ends
            assert all(end.is_certain for end in ends)
            return {end.fate for end in ends}

    with namespace() as node:
        node.nft(f"table inet t {{ {case.of}; chain c {{ {FORWARD} {case.rule}; }}; }}")
        with patch.object(NetlinkSocket, "dump", autospec=True, side_effect=NetlinkSocket.dump) as dump:
            assert node.inside(fates) == {Fate.DROPPED if case.drops else Fate.SENT}
    assert any(call.args[1] == GETSETELEM for call in dump.call_args_list) is case.reads_all
