"""A table of nf_tables that marks packets to be traced, and disappears with the socket that made it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kproxy_core.host.errors import doing
from kproxy_core.host.nftables.connection import Connection
from kproxy_core.host.nftables.objects import OWNER, Chain, Command, Place, Table
from kproxy_core.host.nftables.rules import (
    DESTINATION_PORT,
    L4_PROTOCOL,
    TRACE,
    Rule,
    ct_state,
    destination_address,
    equals,
    is_local,
    limit,
    source_address,
)
from kproxy_core.model.address import Address, Family, Protocol

_PRIORITY = -190
"""After connection tracking, before every translation and before kube-proxy's rules."""
_PER_SECOND = 50
"""Most packets that are traced: each costs an announcement for every rule that it meets."""


class Match(NamedTuple):
    """The packets to trace: the first ones of connections."""

    family: Family
    destination: Address | None
    """None: any address of this node."""
    protocol: Protocol
    port: int
    source: Address | None
    """None: any."""


def open_table(name: str, matches: Sequence[Match]) -> Connection:
    """Create the table *name*, which exists until the connection is closed. Raises HostError."""
    commands: list[Command] = []
    for family in dict.fromkeys(match.family for match in matches):
        table = Table(family, name, flags=OWNER)
        of_family = [match for match in matches if match.family is family]
        commands += [table.create(), *table.write(marking_chains(of_family))]
    with doing("write rules that trace packets"):
        connection = Connection.open()
        try:
            connection.run(commands)
        except BaseException:
            connection.close()
            raise
    return connection


def marking_chains(matches: Iterable[Match]) -> list[Chain]:
    """Return the chains that have packets traced."""
    rules = tuple(map(_rule, matches))
    return [Chain(hook, rules, Place("filter", hook, _PRIORITY)) for hook in ("prerouting", "output")]


def _rule(match: Match) -> Rule:
    family = match.family
    destination = is_local("daddr")
    if match.destination is not None:
        destination = equals(destination_address(family), match.destination)
    source = () if match.source is None else (equals(source_address(family), match.source),)
    return (
        equals(L4_PROTOCOL, match.protocol), destination, *source, equals(DESTINATION_PORT, match.port),
        ct_state("new"), limit(_PER_SECOND), TRACE,
    )  # fmt: skip
