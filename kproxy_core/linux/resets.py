"""The nf_tables table that resets TCP connections to a dialled socket that an endpoint answers.

It works for all connections whose translation connection tracking knows, whichever rules translated them,
and exists only while there is something to reset.
"""

import struct
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import NamedTuple

from kproxy_core.linux.errors import HostError
from kproxy_core.linux.rulesets import ruleset, table_exists
from kproxy_core.model.address import Address, Family, Protocol, Socket
from kproxy_core.model.service import Destination
from kproxy_core.nft.elements import Element
from kproxy_core.nft.objects import Chain, Container, Hook, Object, Table
from kproxy_core.nft.rules import (
    ADDRESS,
    ANSWERING_PORT,
    CT_ORIGINAL,
    L4_PROTOCOL,
    ORIGINAL_PORT,
    PORT,
    RESET,
    RETURN,
    among,
    answering_address,
    equals,
    goto,
    original_destination,
    tcp_flags,
)
from kproxy_core.nft.transaction import RulesetSocket

TABLE = "kproxy-resets"
MOST = 1 << 16
"""Limit for the pairs of a family; connections of further ones are not reset."""

_REMOVED = "removed"
_RESET = "reset-client"
_PRIORITY = -110
_PORT = struct.Struct(">H2x")


class Pair(NamedTuple):
    """A dialled socket, and the endpoint to which TCP connections to it are translated."""

    dialled: Socket
    endpoint: Destination


def reset_table(family: Family) -> Table:
    return Table(family, TABLE)


def removed_set(family: Family) -> Container:
    return Container(_REMOVED, (ADDRESS[family], PORT, ADDRESS[family], PORT))


def reset_objects(family: Family) -> list[Object]:
    """Return the objects of the table.

    The packets of the client are answered with a reset, those of the endpoint pass: a client that only waits
    for an answer gets it, and a reset for its acknowledgement. An endpoint that sends again gets a reset from
    the client's kernel, which has closed the socket.

    Packets with which the client ends the connection pass, so that the endpoint learns of it. With PSH, a
    packet has data to deliver, and the client may await an answer.

    The hooks come after connection tracking (-200) and before the translation (-100), so a reset bears the
    frontend's address as it is sent. A later one has to be translated back, which the kernel leaves out for
    a client behind a bridge (nf_send_reset with bridge-nf-call-iptables=1). Needs Linux 5.9.
    """
    dialled = (original_destination(family), ORIGINAL_PORT)
    match = among((*dialled, answering_address(family), ANSWERING_PORT), _REMOVED)
    rule = (CT_ORIGINAL, equals(L4_PROTOCOL, Protocol.TCP), match, goto(_RESET))
    reset = (
        (tcp_flags("rst", of=("rst",)), RETURN),
        (tcp_flags("fin", of=("fin", "psh")), RETURN),
        (RESET,),
    )
    return [
        removed_set(family), Chain(_RESET, reset),
        *(Chain(hook, (rule,), Hook("filter", hook, _PRIORITY)) for hook in ("prerouting", "output")),
    ]


def element(pair: Pair) -> Element:
    (dialled, port), (address, endpoint_port) = pair
    return Element(dialled + _PORT.pack(port) + address + _PORT.pack(endpoint_port))


def parse_element(family: Family, found: Element) -> Pair | None:
    """Return None for an element of a set with another key."""
    half = family.size + _PORT.size
    if len(found.key) != 2 * half:
        return None
    dialled, endpoint = (
        Destination(Address(part[: family.size]), _PORT.unpack_from(part, family.size)[0])
        for part in (found.key[:half], found.key[half:]))
    return Pair((dialled.address, dialled.port), endpoint)


class ResetTable:
    """The table of one family in the calling thread's network namespace. Not thread-safe."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._table = reset_table(family)
        self._held: frozenset[Pair] | None = None
        """The pairs in the kernel, in a table that this process wrote; None: in any, or none."""

    def read(self) -> frozenset[Pair]:
        """Return the pairs that are reset now, by an earlier process, too. Raises HostError."""
        self._held = None
        if not table_exists(self._family, TABLE):
            self._held = frozenset()
            return self._held
        found = self._read()
        if not found:
            self.write(())
        return found

    def _read(self) -> frozenset[Pair]:
        with self._connected("read") as connection:
            found = connection.elements(self._family, TABLE, _REMOVED)
        pairs = (parse_element(self._family, each) for each in found)
        return frozenset(pair for pair in pairs if pair is not None)

    def write(self, wanted: Collection[Pair]) -> None:
        """Have connections of the *wanted* pairs reset, and no others. Raises HostError."""
        pairs = frozenset(sorted(wanted)[:MOST])
        held, self._held = self._held, None
        if pairs or held != frozenset():
            with self._connected("change") as connection:
                if not pairs:
                    connection.run([self._table.create(), self._table.delete()])
                elif not held or held == pairs or not self._change(connection, held, pairs):
                    # Another process may have changed or deleted the table.
                    layout = {item.name: item for item in reset_objects(self._family)}
                    connection.complete(self._table, layout, {_REMOVED: list(map(element, pairs))})
        self._held = pairs

    def distrust(self) -> None:
        """Have the next `write` replace the table: another process may have changed it."""
        self._held = None

    def _change(self, connection: RulesetSocket, held: frozenset[Pair], pairs: frozenset[Pair]) -> bool:
        """Return False if the table is not as it was: another process has changed it."""
        changes = self._table.change_elements(
            removed_set(self._family), list(map(element, held)), list(map(element, pairs)))
        try:
            connection.run(list(changes))
        except (HostError, OSError):
            return False
        return True

    def _connected(self, verb: str) -> AbstractContextManager[RulesetSocket]:
        return ruleset(f"{verb} table {self._table.where}")


def delete_resets(family: Family, *, dry_run: bool) -> list[str]:
    """Delete the table of *family*, and return its name; nothing if it does not exist. Raises HostError."""
    table = reset_table(family)
    if not table_exists(family, TABLE):
        return []
    if not dry_run:
        with ruleset(f"delete table {table.where}") as connection:
            connection.run([table.delete()])
    return [f"table {table.where}"]
