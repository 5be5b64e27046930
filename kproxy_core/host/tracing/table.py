"""A table of nf_tables that marks packets to be traced, and disappears with the socket that made it."""

import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.messages import Request, attribute, nested, text_attribute
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.model.address import Address, Family, Protocol

_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = (nf_tables.KIND | kind for kind in (0, 3, 6))
_APPEND = 0x800
_OWNER = 2
"""NFT_TABLE_F_OWNER, since Linux 5.12: the kernel deletes the table when its owner's socket is closed."""

_HOOKS = (("prerouting", 0), ("output", 3))
_PRIORITY = -190
"""After connection tracking, before every translation and before kube-proxy's rules."""
_PER_SECOND = 50
"""Most packets that are traced: each costs an announcement for every rule that it meets."""

_EQUAL, _DIFFERENT = 0, 1
_NETWORK, _TRANSPORT = 1, 2
_L4PROTO, _NFTRACE = 16, 12
_ADDRESS_TYPE, _OF_DESTINATION, _LOCAL = 3, 2, 2
_NEW_CONNECTION = 8
_OFFSETS = {Family.IPV4: (12, 16), Family.IPV6: (8, 24)}
"""Of source and destination in the network header."""


class Match(NamedTuple):
    """The packets to trace: the first ones of connections."""

    family: Family
    destination: Address | None
    """None: any address of this node."""
    protocol: Protocol
    port: int
    source: Address | None
    """None: any."""


def open_table(name: str, matches: Sequence[Match]) -> NetlinkSocket:
    """Create the table *name*; it exists until the socket that is returned is closed. Raises OSError."""
    requests = [
        request for family in dict.fromkeys(match.family for match in matches)
        for request in _requests(name, family, [match for match in matches if match.family is family])
    ]  # fmt: skip
    sock = NetlinkSocket.open(netlink.NETLINK_NETFILTER)
    try:
        for refusal in sock.transact(*nf_tables.transaction(requests)):
            raise refusal.error
    except OSError:
        sock.close()
        raise
    return sock


def _requests(table: str, family: Family, matches: Sequence[Match]) -> Iterator[Request]:
    start = nf_tables.payload(family, text_attribute(1, table))
    yield Request(_NEW_TABLE, netlink.NLM_F_CREATE, start + _u32(2, _OWNER))
    for name, hook in _HOOKS:
        place = nested(4, _u32(1, hook), attribute(2, struct.pack(">i", _PRIORITY)))
        yield Request(_NEW_CHAIN, netlink.NLM_F_CREATE,
                      start + text_attribute(3, name) + place + text_attribute(7, "filter"))
        for match in matches:
            rule = nested(4, *(nested(1, text_attribute(1, kind), nested(2, *attributes))
                               for kind, *attributes in _expressions(match)))  # fmt: skip
            yield Request(_NEW_RULE, netlink.NLM_F_CREATE | _APPEND, start + text_attribute(2, name) + rule)


_Expression = tuple[str, *tuple[bytes, ...]]


def _expressions(match: Match) -> Iterator[_Expression]:
    at_source, at_destination = _OFFSETS[match.family]
    size = match.family.size
    yield "meta", _u32(1, 1), _u32(2, _L4PROTO)
    yield _compare(bytes([match.protocol]))
    if match.destination is None:
        yield "fib", _u32(1, 1), _u32(2, _ADDRESS_TYPE), _u32(3, _OF_DESTINATION)
        yield _compare(_LOCAL.to_bytes(4, sys.byteorder))
    else:
        yield _payload(_NETWORK, at_destination, size)
        yield _compare(match.destination)
    if match.source is not None:
        yield _payload(_NETWORK, at_source, size)
        yield _compare(match.source)
    yield _payload(_TRANSPORT, 2, 2)
    yield _compare(match.port.to_bytes(2, "big"))
    yield "ct", _u32(1, 1), _u32(2, 0)
    mask, zero = _NEW_CONNECTION.to_bytes(4, sys.byteorder), bytes(4)
    yield "bitwise", _u32(1, 1), _u32(2, 1), _u32(3, 4), nested(4, attribute(1, mask)), nested(
        5, attribute(1, zero))
    yield _compare(zero, _DIFFERENT)
    yield ("limit", attribute(1, struct.pack(">Q", _PER_SECOND)), attribute(2, struct.pack(">Q", 1)),
           _u32(3, _PER_SECOND), _u32(4, 0))
    yield "immediate", _u32(1, 1), nested(2, attribute(1, b"\1"))
    yield "meta", _u32(2, _NFTRACE), _u32(3, 1)


def _payload(base: int, offset: int, size: int) -> _Expression:
    return "payload", _u32(1, 1), _u32(2, base), _u32(3, offset), _u32(4, size)


def _compare(value: bytes, how: int = _EQUAL) -> _Expression:
    return "cmp", _u32(1, 1), _u32(2, how), nested(3, attribute(1, value))


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))
