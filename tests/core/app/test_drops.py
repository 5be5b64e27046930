"""The way of packets through filter chains, as it is predicted and as the kernel decides."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kproxy_core.app.drops import Drop, FilteredPacket, drops
from kproxy_core.model.address import Family, Protocol, parse_address
from kproxy_core.netlink.messages import NETLINK_NETFILTER
from kproxy_core.netlink.sockets import NetlinkSocket
from kproxy_core.nft.packet import Interface
from kproxy_core.nft.ruleset import ListedRuleset
from tests.core.namespaces import Namespace, namespace
from tests.patience import PATIENCE

CLIENT, SERVER, DIALLED = "10.0.1.2", "10.0.2.2", "10.0.9.9"
TRANSLATION = f"""
table ip kproxy {{ chain p {{
    type nat hook prerouting priority dstnat;
    ip daddr {DIALLED} tcp dport 80 dnat to {SERVER}:8080;
}}; }}
"""

FORWARD = "type filter hook forward priority 0;"
PREROUTING = "type filter hook prerouting priority"


class Case(NamedTuple):
    rules: str
    """Of nft, or of iptables-restore if they begin with ``*``."""
    place: tuple[str, int | None] | None
    """The chain and the rule that drop the packet."""


def at_forward(*rules: str) -> str:
    return f"table inet t {{ chain c {{ {FORWARD} {'; '.join(rules)}; }}; }}"


def at_prerouting(priority: str, *rules: str) -> str:
    return f"table inet t {{ chain c {{ {PREROUTING} {priority}; {'; '.join(rules)}; }}; }}"


def iptables(*rules: str, policy: str = "ACCEPT") -> str:
    chains = "".join(f":{chain} - [0:0]\n" for chain in ("OTHER", "MORE"))
    return f"*filter\n:FORWARD {policy} [0:0]\n{chains}" + "".join(f"{rule}\n" for rule in rules) + "COMMIT\n"


CASES = {
    "nothing": Case(at_forward("counter"), None),
    "a drop": Case(at_forward("counter", "counter drop"), ("c", 2)),
    "a rejection": Case(at_forward("counter reject with icmpx admin-prohibited"), ("c", 1)),
    "accepted before": Case(at_forward("accept", "counter drop"), None),
    "states": Case(at_forward("ct state { established, related } accept", "ct state invalid drop",
                              "ct state new counter drop"), ("c", 3)),
    "a map of states": Case(
        f"table ip t {{ chain n {{ counter drop; }}; chain c {{ {FORWARD} "
        "ct state vmap { established : accept, new : jump n, invalid : drop }; }; }", ("n", 1)),
    "no untracked packet": Case(at_forward("ct state untracked counter drop"), None),
    "the state before tracking": Case(at_prerouting("raw", "ct state new counter drop"), None),
    "translated": Case(at_forward("ct status dnat accept", "counter drop"), None),
    "an original address": Case(at_forward(f"ct original ip daddr {DIALLED} counter drop"), ("c", 1)),
    "an original port": Case(at_forward("meta l4proto tcp ct original proto-dst 80 counter drop"), ("c", 1)),
    "before the translation": Case(at_prerouting("raw", f"ip daddr {DIALLED} counter drop"), ("c", 1)),
    "not yet the endpoint": Case(at_prerouting("mangle", f"ip daddr {SERVER} counter drop"), None),
    "after the translation": Case(at_prerouting("0", f"ip daddr {SERVER} tcp dport 8080 counter drop"),
                                  ("c", 1)),
    "another address": Case(at_forward("ip saddr 10.0.1.3 drop", "ip daddr != 10.0.0.0/8 drop"), None),
    "a network": Case(at_forward("ip saddr 10.0.1.0/25 counter drop"), ("c", 1)),
    "a network of odd bits": Case(at_forward("ip saddr 10.0.0.0/15 counter drop"), ("c", 1)),
    "a set": Case(at_forward("ip saddr { 10.0.1.1, 10.0.1.2 } counter drop"), ("c", 1)),
    "not in a set": Case(at_forward("ip saddr != { 10.0.1.1, 10.0.1.3 } counter drop"), ("c", 1)),
    "a set of intervals": Case(at_forward("ip saddr { 10.0.0.0/24, 10.0.1.0-10.0.1.1, 10.0.1.3 } drop",
                                          "ip saddr { 10.0.0.0/24, 10.0.1.2-10.0.1.9 } counter drop"),
                               ("c", 2)),
    "an empty set": Case(
        f"table ip t {{ set s {{ type ipv4_addr; }}; chain c {{ {FORWARD} ip saddr @s counter drop; }}; }}",
        None),
    "concatenated intervals": Case(
        at_forward("ip saddr . tcp dport { 10.0.1.0/24 . 1-8079, 10.0.3.0/24 . 8080 } drop",
                   "ip saddr . tcp dport { 10.0.1.0/24 . 8000-9000 } counter drop"), ("c", 2)),
    "all others": Case(at_forward("ip saddr vmap { 10.0.1.3 : accept, * : jump d }").replace(
        "chain c", "chain d { counter drop; }; chain c"), ("d", 1)),
    "a range": Case(at_forward("tcp dport 8081-9000 drop", "tcp dport != 8080-9000 drop",
                               "tcp dport 8000-8080 counter drop"), ("c", 3)),
    "interfaces": Case(at_forward('iifname "s0" drop', 'iifname "c0" oifname "s0" counter drop'), ("c", 2)),
    "beginnings of names": Case(at_forward('iifname "s*" drop', 'iifname "c*" counter drop'), ("c", 2)),
    "interfaces by number": Case(at_forward("iif lo drop", "iif c0 oif s0 counter drop"), ("c", 2)),
    "no way out yet": Case(at_prerouting("0", 'oifname "s0" counter drop'), None),
    "protocols": Case(at_forward("meta l4proto udp drop", "meta nfproto ipv6 drop", "meta protocol ip6 drop",
                                 "ip protocol tcp counter drop"), ("c", 4)),
    "flags": Case(at_forward("tcp flags & (fin | syn | rst | ack) == syn counter drop"), ("c", 1)),
    "a mark": Case(
        f"table inet t {{ chain p {{ {PREROUTING} mangle; meta mark set 0x5; }}; "
        f"chain c {{ {FORWARD} meta mark 0 drop; meta mark & 0x4 == 0x4 counter drop; }}; }}", ("c", 2)),
    "a mapped mark": Case(at_forward("meta mark set tcp dport map { 80 : 1, 8080 : 2 }",
                                     "meta mark 2 counter drop"), ("c", 2)),
    "addresses of the node": Case(at_forward("fib daddr type local drop", "fib saddr type local drop",
                                             "fib daddr type unicast counter drop"), ("c", 3)),
    "the route back": Case(at_prerouting("0", "fib saddr . iif oif missing drop"), None),
    "a return": Case(
        f"table ip t {{ chain d {{ return; drop; }}; chain c {{ {FORWARD} jump d; counter drop; }}; }}",
        ("c", 2)),
    "no return": Case(
        f"table ip t {{ chain d {{ counter; }}; chain c {{ {FORWARD} goto d; counter drop; }}; }}", None),
    "several tables": Case(
        f"{at_forward('accept')}\n{at_forward('counter drop').replace('inet t', 'ip u')}", ("c", 1)),
    "a dormant table": Case(at_forward("counter drop").replace("chain c", "flags dormant; chain c"), None),
    "another family": Case(at_forward("counter drop").replace("inet t", "ip6 t"), None),
    "a policy of iptables": Case(
        iptables("-A FORWARD -s 10.0.1.3 -j ACCEPT", policy="DROP"), ("FORWARD", None)),
    "states of iptables": Case(iptables(
        "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-A FORWARD -m conntrack --ctstate NEW -m comment --comment x -j DROP"), ("FORWARD", 2)),
    "translated, by iptables": Case(iptables(
        "-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT", policy="DROP"), None),
    "a status": Case(iptables(
        "-A FORWARD -m conntrack --ctstatus CONFIRMED -j DROP",
        "-A FORWARD -m conntrack ! --ctstatus ASSURED -j DROP"), ("FORWARD", 2)),
    "a target of iptables": Case(iptables(
        "-A FORWARD -j LOG", "-A FORWARD -p tcp -m tcp --dport 8080 -j REJECT"), ("FORWARD", 2)),
    "chains of iptables": Case(iptables(
        "-A FORWARD -i c0 -j OTHER", "-A OTHER ! -s 10.0.1.0/24 -j DROP", "-A OTHER -g MORE",
        "-A OTHER -j DROP", "-A MORE -o lo -j DROP", "-A FORWARD -j DROP"), ("FORWARD", 2)),
    "kinds of addresses": Case(iptables(
        "-A FORWARD -m addrtype --dst-type LOCAL -j DROP",
        "-A FORWARD -m addrtype ! --src-type LOCAL -j DROP"), ("FORWARD", 2)),
    "the route back, by iptables": Case(
        "*mangle\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -m rpfilter --validmark --invert -j DROP\n"
        "-A PREROUTING -m rpfilter -j DROP\nCOMMIT\n", ("PREROUTING", 2)),
    "a drop among the translations": Case(
        "table ip t { chain c { type nat hook prerouting priority dstnat - 5; counter drop; }; }", ("c", 1)),
    "a state, by the older match of iptables": Case(iptables(
        "-A FORWARD -m state --state RELATED,ESTABLISHED -j ACCEPT", "-A FORWARD -j DROP"), ("FORWARD", 2)),
    "addresses of the node before the translation": Case(
        at_prerouting("raw", "fib daddr type local drop", "fib daddr type unicast counter drop"), ("c", 2)),
    "a mark of iptables": Case(iptables(
        "-A FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", policy="DROP"), ("FORWARD", None)),
}


class Rig(NamedTuple):
    router: Namespace
    client: Namespace
    listener: socket.socket


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with namespace() as router, namespace() as client, namespace() as server:
        router.ip(
            f"link add c0 type veth peer name eth0 netns {client.name}",
            f"link add s0 type veth peer name eth0 netns {server.name}",
            "address add 10.0.1.1/24 dev c0", "address add 10.0.2.1/24 dev s0",
            "link set c0 up", "link set s0 up",
        )  # fmt: skip
        for end, own, gateway in ((client, CLIENT, "10.0.1.1"), (server, SERVER, "10.0.2.1")):
            end.ip(f"address add {own}/24 dev eth0", "link set eth0 up", f"route add default via {gateway}")
        router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        listener = server.inside(lambda: socket.create_server((SERVER, 8080)))
        with contextlib.closing(listener):
            yield Rig(router, client, listener)


def set_rules(router: Namespace, rules: str) -> None:
    router.nft(f"flush ruleset\n{TRANSLATION}{'' if rules.startswith('*') else rules}")
    if rules.startswith("*"):
        router.run("iptables-nft-restore", "--noflush", stdin=rules)


def predicted(router: Namespace) -> list[Drop]:
    def read() -> list[Drop]:
        source, server = parse_address(CLIENT), parse_address(SERVER)
        packet = FilteredPacket(
            Family.IPV4, Protocol.TCP, source, server, 8080, Interface("c0", socket.if_nametoindex("c0")),
            Interface("s0", socket.if_nametoindex("s0")), parse_address(DIALLED), 80,
            is_translated=True, is_from_node=False, is_to_node=False, is_dialled_on_node=False)
        with NetlinkSocket.open(NETLINK_NETFILTER) as sock:
            filters = ListedRuleset(sock)
            return drops(filters, [(hook, packet) for hook in ("prerouting", "forward", "postrouting")])

    return router.inside(read)


@pytest.mark.parametrize("name", CASES)
def test_a_packet_ends_where_it_is_predicted(name: str, rig: Rig) -> None:
    case = CASES[name]
    set_rules(rig.router, case.rules)
    found = predicted(rig.router)
    assert all(drop.is_certain for drop in found)
    assert [(drop.chain, drop.rule) for drop in found] == ([case.place] if case.place else [])
    with contextlib.closing(rig.client.inside(lambda: socket.socket(socket.AF_INET))) as sock:
        sock.setblocking(False)
        sock.connect_ex((DIALLED, 80))
        deadline = time.monotonic() + PATIENCE
        while case.place and not predicted(rig.router)[0].packets:
            assert time.monotonic() < deadline, "the packet was not counted there"
        if not case.place:
            assert select.select([], [sock], [], PATIENCE)[1]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            rig.listener.accept()[0].close()


AT_RANDOM = "-m statistic --mode random --probability 0.5"
UNCLEAR = {
    "a meter": (
        at_forward("meter m { ip saddr limit rate over 9/second } drop"),
        [("c", 1, False, ("dynset with limit in rule 1 of chain c",))]),
    "a limit": (at_forward("limit rate 1/second accept", "counter drop"),
                [("c", 2, True, ("limit in rule 1 of chain c",))]),
    "a random number": (at_forward("numgen random mod 2 0 counter drop", "accept"),
                        [("c", 1, False, ("numgen in rule 1 of chain c",))]),
    "a match of iptables": (iptables(
        f"-A FORWARD {AT_RANDOM} -j OTHER", "-A OTHER -j ACCEPT", policy="DROP"),
        [("FORWARD", None, True, ("match statistic in rule 1 of chain FORWARD",))]),
    "a return": (iptables(
        "-A FORWARD -j OTHER", f"-A OTHER {AT_RANDOM} -j RETURN",
        "-A OTHER -j DROP"), [("OTHER", 2, True, ("match statistic in rule 1 of chain OTHER",))]),
    "a way that may not be taken": (iptables(
        f"-A FORWARD {AT_RANDOM} -j OTHER", "-A OTHER -j DROP",
        "-A FORWARD -j DROP"), [
            ("OTHER", 1, False, ("match statistic in rule 1 of chain FORWARD",)), ("FORWARD", 2, True, ())]),
    "chains of a service proxy": (iptables(
        "-A FORWARD -j KUBE-SERVICES", "-A KUBE-SERVICES -j DROP").replace(
            ":OTHER", ":KUBE-SERVICES - [0:0]\n:OTHER"), []),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_not_understood_is_said(name: str, rig: Rig) -> None:
    rules, expected = UNCLEAR[name]
    set_rules(rig.router, rules)
    assert [(drop.chain, drop.rule, drop.is_met, drop.doubts) for drop in predicted(rig.router)] == expected


def test_a_translation_before_that_of_the_service_proxy_is_named(rig: Rig) -> None:
    base = f"type nat hook prerouting priority dstnat - 5; ip daddr {DIALLED} tcp dport 80 jump d"
    set_rules(rig.router, f"table ip t {{ chain d {{ meta l4proto tcp counter dnat to {SERVER}:81; }}; "
              f"chain c {{ {base}; }}; }}")
    (found,) = predicted(rig.router)
    assert (found.chain, found.rule, found.is_certain) == ("d", 1, True)
    assert found.translates_to == (parse_address(SERVER), 81)


def test_a_translation_behind_that_of_the_service_proxy_is_not_met(rig: Rig) -> None:
    set_rules(rig.router, f"table ip t {{ chain c {{ type nat hook prerouting priority dstnat + 5; "
              f"ip daddr {DIALLED} meta l4proto tcp counter dnat to {SERVER}:81; }}; }}")
    assert predicted(rig.router) == []


@pytest.mark.parametrize(("rules", "chain"), [
    (at_prerouting("raw", f"ip daddr {DIALLED} tcp dport 80 notrack"), "c"),
    (f"*raw\n-A PREROUTING -d {DIALLED}/32 -p tcp -m tcp --dport 80 -j NOTRACK\nCOMMIT\n", "PREROUTING"),
    (f"*raw\n-A PREROUTING -d {DIALLED}/32 -p tcp -m tcp --dport 80 -j CT --notrack\nCOMMIT\n", "PREROUTING"),
], ids=["nft", "iptables", "target CT"])  # fmt: skip
def test_an_exemption_from_translation_is_named(rig: Rig, rules: str, chain: str) -> None:
    """As NodeLocal DNSCache makes it; the packet is sent to the address that was dialled."""
    set_rules(rig.router, rules)
    (found,) = predicted(rig.router)
    assert (found.chain, found.rule, found.is_certain, found.exempts) == (chain, 1, True, True)


def test_an_exemption_of_another_port_is_not_met(rig: Rig) -> None:
    set_rules(rig.router, at_prerouting("raw", f"ip daddr {DIALLED} tcp dport 81 notrack"))
    assert predicted(rig.router) == []


def test_a_ruleset_with_many_ways_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """9^14 jumps; 10,000 rules take seconds."""
    monkeypatch.setattr("kproxy_core.nft.interpret._LONGEST", 2_000)
    chains = "".join(f"chain c{at} {{ {f'jump c{at + 1}; ' * 9} }};" for at in reversed(range(14)))
    set_rules(
        rig.router, f"table ip t {{ chain c14 {{ counter; }}; {chains} chain c {{ {FORWARD} jump c0; }}; }}")
    (drop,) = predicted(rig.router)
    assert (drop.is_met, drop.doubts) == (False, ("more than 2,000 rules",))
