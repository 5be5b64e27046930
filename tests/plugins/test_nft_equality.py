"""Tables as kproxy writes them over netlink, compared with those that nft makes of the rendered text."""

from collections.abc import Iterator, Mapping
from itertools import filterfalse
from typing import NamedTuple

import pytest
from msgspec import structs

from kproxy_conformance.builders import node_view
from kproxy_conformance.checks.features import everything
from kproxy_core.linux.tracing import Match, marking_chains, receiving_chains
from kproxy_core.model.address import Family, Protocol, parse_address, parse_cidr
from kproxy_core.model.node import LocalSource
from kproxy_core.netlink.messages import attribute, text_attribute
from kproxy_core.nft.elements import Element
from kproxy_core.nft.messages import Command, commands_text
from kproxy_core.nft.objects import Chain, Container, Layout, Table
from kproxy_core.nft.rules import Expression
from kproxy_core.nft.transaction import RulesetSocket, completion, constants
from kproxy_core.plan.hashing import HashBy
from kproxy_core.plan.service_plan import Frontend
from kproxy_nft import counting
from kproxy_nftables import skeleton
from kproxy_nftables.detect import TEMPLATES
from kproxy_nftables.names import Template
from kproxy_nftables.settings import Settings
from kproxy_nftables.skeleton import all_owned
from kproxy_userspace.batch import nft_elements
from kproxy_userspace.skeleton import nft_layout, nft_table
from kproxy_userspace.wanted import Portal, Redirect
from tests.nft_releases.releases import BOOKWORM, RELEASES, TRIXIE, Release

_LENGTH = 4
"""NFTA_BYTEORDER_LEN"""
HASHES: tuple[HashBy, ...] = ("client", "flow")
ADDRESS = {Family.IPV4: parse_address("10.96.0.1"), Family.IPV6: parse_address("fd00:96::1")}


class Case(NamedTuple):
    """A table with all its objects."""

    what: str
    table: Table
    layout: Layout
    contents: Mapping[str, frozenset[Element]] = {}

    def __str__(self) -> str:
        return f"{self.table.family.label}-{self.what}"

    def commands(self) -> list[Command]:
        return completion(self.table, self.layout, self.contents, None)


def counting_cases(family: Family) -> Iterator[Case]:
    unserved = counting.unserved_elements([
        Frontend(ADDRESS[family], Protocol.TCP, 80), Frontend(ADDRESS[family], Protocol.SCTP, 65535),
        Frontend(None, Protocol.UDP, 30080),
    ])  # fmt: skip
    for ipvs in (False, True):
        yield Case(
            f"counts{'-with-ipvs' * ipvs}", counting.counting_table(family, ipvs=ipvs),
            counting.counting_layout(family, ipvs=ipvs), unserved)


def portal_cases(family: Family) -> Iterator[Case]:
    ranges = {
        Family.IPV4: ("0.0.0.0/0", "10.0.0.0/8", "192.0.2.64/27", "192.0.2.7/32"),
        Family.IPV6: ("::/0", "2001:db8::/32", "2001:db8:1::8/125", "2001:db8:2::7/128"),
    }
    address = ADDRESS[family]
    portals = [
        Portal(Protocol.TCP, address, 80, "default/web"), Portal(Protocol.UDP, address, 53, "default/dns"),
        Portal(Protocol.UDP, None, 30053, "default/dns"),
        *(Portal(Protocol.TCP, address, 1000 + number, "default/lb", source=parse_cidr(source))
          for number, source in enumerate(ranges[family])),
    ]  # fmt: skip
    for at in (None, ADDRESS[family]):
        redirects = [Redirect(portal, 40000 + number, at) for number, portal in enumerate(portals)]
        yield Case(
            f"portals-to-{'everywhere' if at is None else 'one-address'}", nft_table(family),
            nft_layout(family, at), nft_elements(redirects))


def service_cases(family: Family) -> Iterator[Case]:
    """The nftables mode: all templates and objects of service ports, for each way to recognise pods."""
    plans = everything(family).values()
    ipv4 = family is Family.IPV4
    sources = {
        "network": LocalSource(cidr=parse_cidr("10.244.0.0/17" if ipv4 else "fd00:10:244::/61")),
        "bridge": LocalSource(interface="cni0"),
        "prefix": LocalSource(interface_prefix="veth"),
        "nothing": None,
    }
    by_hash = {
        Template(protocol, "cluster", 1021, 0, False, node_port, hash_by)
        for protocol in Protocol for node_port in (False, True) for hash_by in HASHES}
    templates = {*TEMPLATES, *by_hash, *skeleton.templates_of(plans)}
    for what, source in sources.items():
        cidrs = "10.96.0.0/13 10.104.0.0/13 198.18.0.0/15" if ipv4 else "fd00:96::/112 fd00:97::/108"
        node = structs.replace(
            node_view(family=family, anywhere=what != "nothing", service_cidrs=cidrs),
            local_source=source, masquerade_all=what == "bridge", masquerade_bit=14 if source else 31,
        )  # fmt: skip
        settings = Settings(counted=what in ("network", "nothing"))
        layout = skeleton.layout(node, templates, all_owned(plans), settings)
        assert any(name.startswith("endpoints-") for name in layout)
        yield Case(f"services-of-pods-by-{what}", skeleton.table(family), layout)


def trace_cases(family: Family) -> Iterator[Case]:
    matches = [
        Match(family, ADDRESS[family], Protocol.TCP, 80, None),
        Match(family, ADDRESS[family], Protocol.UDP, 53, ADDRESS[family]),
        Match(family, None, Protocol.SCTP, 30080, None),
    ]
    yield Case("trace", Table(family, "traced"), {item.name: item for item in marking_chains(matches)})


KINDS = (service_cases, counting_cases, portal_cases, trace_cases)
CASES = [case for cases in KINDS for family in Family for case in cases(family)]

by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_release = pytest.mark.parametrize("release", RELEASES, ids=str)


def write(commands: list[Command]) -> None:
    with RulesetSocket.open() as connection:
        connection.run(commands)


def missing(case: Case) -> list[Command]:
    """Return the commands that bring the kernel to the table."""
    with RulesetSocket.open() as connection:
        held = connection.read(
            case.table.family, case.table.name, [*case.contents, *constants(case.layout)])
    if held is not None:
        held = held._replace(rules={
            chain: [
                rule._replace(expressions=tuple(filterfalse(is_void, rule.expressions))) for rule in rules]
            for chain, rules in held.rules.items()
        })  # fmt: skip
    return completion(case.table, case.layout, case.contents, held)


def is_void(expression: Expression) -> bool:
    """Return whether *expression* swaps the bytes of a single byte, as libnftables does in networks' keys."""
    return expression.name == "byteorder" and expression.attributes[_LENGTH] == (1).to_bytes(4, "big")


def nft(release: Release, *arguments: str, stdin: str = "") -> str:
    done = release.run(*arguments, stdin=stdin)
    assert done.returncode == 0, f"nft {' '.join(arguments)}: {done.returncode} {done.stderr}"
    return done.stdout


def listed(release: Release, case: Case) -> str:
    return nft(release, "list", "table", *case.table.where.split())


@by_release
@by_case
def test_messages_and_text_make_the_same_table(netns: None, case: Case, release: Release) -> None:
    write(case.commands())
    assert missing(case) == []
    by_messages = listed(release, case)
    write([case.table.delete()])
    nft(release, "-f", "-", stdin=commands_text(case.commands()))
    assert listed(release, case) == by_messages


@by_release
def test_a_table_at_interfaces_is_the_same_in_messages_and_text(netns: None, release: Release) -> None:
    matches = [Match(family, ADDRESS[family], protocol, 80, None)
               for family in Family for protocol in Protocol]
    table = Table(Family.IPV4, "traced", is_netdev=True)
    commands = [table.create(), *table.write(receiving_chains(matches, ["lo"]))]
    write(commands)
    by_messages = nft(release, "list", "table", "netdev", "traced")
    assert by_messages.count("meta nftrace set 1") == len(matches)
    write([table.delete()])
    nft(release, "-f", "-", stdin=commands_text(commands))
    assert nft(release, "list", "table", "netdev", "traced") == by_messages


@by_case
def test_a_table_written_by_nft_is_complete(netns: None, case: Case) -> None:
    """Our choice of expressions is that of libnftables 1.0.6."""
    nft(BOOKWORM, "-f", "-", stdin=commands_text(case.commands()))
    assert [command.text for command in missing(case)] == []


@by_case
def test_a_table_of_a_newer_nft_is_replaced_by_one_that_an_older_nft_can_read(
    netns: None, case: Case
) -> None:
    """nft 1.0.6 crashes on most sets of 1.1.3."""
    nft(TRIXIE, "-f", "-", stdin=commands_text(case.commands()))
    write(missing(case))
    assert missing(case) == []
    by_us = listed(BOOKWORM, case)
    nft(BOOKWORM, "delete", "table", *case.table.where.split())
    write(case.commands())
    assert listed(BOOKWORM, case) == by_us


@by_release
@by_case
def test_nft_lists_changes_and_deletes_the_table(netns: None, case: Case, release: Release) -> None:
    where = case.table.where
    write(case.commands())
    assert nft(release, "list", "ruleset").startswith(f"table {where} {{\n")
    changes = []
    for item in case.layout.values():
        if isinstance(item, Container):
            changes.append(f"flush {'map' if item.value else 'set'} {where} {item.name}")
        elif isinstance(item, Chain):
            changes.append(f"insert rule {where} {item.name} counter")
            changes.append(f"flush chain {where} {item.name}")
    for change in changes:
        nft(release, change)
    assert missing(case) != []
    write(missing(case))
    assert missing(case) == []
    nft(release, f"delete table {where}")
    assert nft(release, "list", "ruleset") == ""


def test_a_counter_is_the_same_where_the_kernel_pads_its_numbers() -> None:
    """As on machines that cannot load a number of 8 bytes from any address."""
    def counting_rule(*pads: bytes, packets: int = 0) -> Expression:
        numbers = [attribute(1, bytes(8)), *pads, attribute(2, packets.to_bytes(8, "big"))]
        counter = text_attribute(1, "counter") + attribute(2, b"".join(numbers))
        return Expression("dynset", {1: b"refused\0", 7: counter})

    assert counting_rule().is_same(counting_rule(attribute(3, b"")))
    assert not counting_rule().is_same(counting_rule(packets=1))
    assert not counting_rule().is_same(Expression("dynset", {1: b"refused\0"}))
