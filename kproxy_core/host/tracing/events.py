"""The kernel's announcements about traced packets: one for each rule, verdict and policy that they meet."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kproxy_core.host.conntrack.events import Direction
from kproxy_core.host.netlink import nf_tables
from kproxy_core.host.netlink.announcements import Announcements
from kproxy_core.host.netlink.messages import NFGENMSG, attributes, messages, text
from kproxy_core.model.address import Address

_NFNLGRP_NFTRACE = 9
_TRACE = nf_tables.KIND | 17
_NFT_TRACETYPE_RULE = 3
_DROP, _ACCEPT = 0, 1
_JUMPS = {-3: "jump", -4: "goto", -5: "return", -1: "continue"}


class TraceEvent(NamedTuple):
    packet: int
    """The same number for all announcements about one packet."""
    is_rule: bool
    """Of a rule, not of a policy or of the end of a chain."""
    family: str
    """nft's name: ``ip``, ``ip6``, ``inet``."""
    table: str
    chain: str
    handle: int
    """Of the rule; 0: no rule."""
    verdict: str
    """``accept``, ``drop``, ``jump CHAIN``, ``continue``."""
    protocol: int
    """With `way`, only in the first announcement about a packet; else 0."""
    way: Direction | None


def trace_events() -> Announcements[TraceEvent]:
    """Follow the traced packets from now on. Raises HostError without CAP_NET_ADMIN."""
    return Announcements((_NFNLGRP_NFTRACE,), parse, "trace packets")


def parse(data: bytes) -> Iterator[TraceEvent]:
    """Yield the announcements in one datagram."""
    for kind, _, _, start, end in messages(data):
        if kind != _TRACE:
            continue
        found = attributes(data, start + NFGENMSG.size, end)
        protocol, way = _way(found.get(8, b""), found.get(9, b""))
        yield TraceEvent(
            int.from_bytes(found.get(6, b""), "big"),
            int.from_bytes(found.get(4, b""), "big") == _NFT_TRACETYPE_RULE,
            nf_tables.FAMILIES.get(data[start], "?"), text(found.get(1, b"")), text(found.get(2, b"")),
            int.from_bytes(found.get(3, b""), "big"), _verdict(found), protocol, way,
        )  # fmt: skip


def _verdict(found: dict[int, bytes]) -> str:
    parts = {1: found[16]} if 16 in found else attributes(found.get(5, b""))
    code, chain = int.from_bytes(parts.get(1, b""), "big", signed=True), text(parts.get(2, b""))
    if code == _DROP:
        return "drop"
    name = "accept" if code == _ACCEPT else _JUMPS.get(code, f"verdict {code}")
    return f"{name} {chain}".rstrip()


def _way(network: bytes, transport: bytes) -> tuple[int, Direction | None]:
    """Return protocol, addresses and ports of the headers of a packet."""
    if len(network) < 20 or len(transport) < 4:
        return 0, None
    if network[0] >> 4 == 4:
        protocol, source, destination = network[9], network[12:16], network[16:20]
    elif len(network) >= 40:
        protocol, source, destination = network[6], network[8:24], network[24:40]
    else:
        return 0, None
    source_port, port = struct.unpack_from(">HH", transport)
    return protocol, Direction(Address(source), source_port, Address(destination), port)
