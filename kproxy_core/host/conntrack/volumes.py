"""Packets and bytes of translated connections, which the kernel counts with ``nf_conntrack_acct``."""

import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.host import sysctl
from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import HostError, doing
from kproxy_core.host.netlink.messages import NLA_F_NESTED, Span, attributes
from kproxy_core.model.address import Address, Family

SETTING = "net.netfilter.nf_conntrack_acct"


class Volume(NamedTuple):
    """Numbers of both directions. Bytes are those of IP packets, headers included."""

    packets_to_endpoint: int = 0
    bytes_to_endpoint: int = 0
    packets_from_endpoint: int = 0
    bytes_from_endpoint: int = 0

    def plus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.add, self, other))

    def minus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.sub, self, other))


NO_VOLUME = Volume()


class Way(NamedTuple):
    """The sockets of translated connections, as conntrack has them."""

    family: Family
    protocol: int
    destination: Address
    port: bytes
    """Dialled by the client, at `destination`. In network order."""
    endpoint: Address
    endpoint_port: bytes


Volumes = Mapping[Way, Volume]


def are_counted() -> bool:
    """Return whether new connections are counted, in the calling thread's network namespace."""
    try:
        return sysctl.read(SETTING.replace(".", "/")) == "1"
    except HostError:
        return False


def read_volumes(family: Family) -> dict[Way, Volume]:
    """Return the sums over this thread's whole table, at 4.5 us a connection. Raises HostError."""
    with doing(f"list {family.label} connections"):
        return ctnetlink.flows(family, lambda flows: _sums(flows, family))


def ended_volumes(events: Iterator[Span], family: Family) -> dict[Way, Volume]:
    """Return the sums over the connections that *events* report as destroyed."""
    return _sums(ctnetlink.decode(events, family), family)


def _sums(flows: Iterable[ctnetlink.TrackedFlow], family: Family) -> dict[Way, Volume]:
    found: dict[tuple[int, Address, bytes, Address, bytes], list[int]] = {}
    for flow in flows:
        size, address, port = ctnetlink.answered_by(family, flow)
        if address == flow.destination and port == flow.port:
            continue
        numbers = _numbers(flow, size)
        if numbers is None:
            continue  # It is older than the setting.
        way = flow.protocol, flow.destination, flow.port, address, port
        sums = found.setdefault(way, [0, 0, 0, 0])
        for at, number in enumerate(numbers):
            sums[at] += number
    return {Way(family, *way): Volume(*sums) for way, sums in found.items()}


def _numbers(flow: ctnetlink.TrackedFlow, size: int) -> Sequence[int] | None:
    """Return the counters behind a reply tuple of *size* bytes; None without any."""
    at = flow.data.find(_HEADS[0], flow.start, flow.end)
    if at >= 0:
        found = _COUNTERS.unpack_from(flow.data, at)
        if found[::2] == _HEADS:
            return found[1::2]
    rest = attributes(flow.data, flow.start + flow.size + size, flow.end)
    if not rest.keys() >= {_ORIGINAL, _REPLY}:
        return None
    both = [attributes(rest[kind], 0, len(rest[kind])) for kind in (_ORIGINAL, _REPLY)]
    return [int.from_bytes(counters[kind], "big") for counters in both for kind in (1, 2)]


# The kernel writes the counters of both directions in a row: the attributes CTA_COUNTERS_ORIG and
# CTA_COUNTERS_REPLY, each with CTA_COUNTERS_PACKETS and CTA_COUNTERS_BYTES. Where 64 bits must be aligned, it
# adds padding.
_ORIGINAL, _REPLY = 9, 10
_COUNTERS = struct.Struct(">8sQ4sQ8sQ4sQ")
_NUMBER = struct.Struct("=HH")
_PACKETS, _BYTES = _NUMBER.pack(12, 1), _NUMBER.pack(12, 2)
_HEADS = (
    _NUMBER.pack(28, _ORIGINAL | NLA_F_NESTED) + _PACKETS, _BYTES,
    _NUMBER.pack(28, _REPLY | NLA_F_NESTED) + _PACKETS, _BYTES,
)  # fmt: skip
