"""Packets and bytes of translated connections, as counted by the kernel, living or ended."""

import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kproxy_core.linux.conntrack import TrackedFlow, answered_by, decode, dump_flows
from kproxy_core.linux.errors import doing
from kproxy_core.model.address import Address, Family
from kproxy_core.netlink.messages import NLA_F_NESTED, Span, attributes

_COUNTERS_ORIG, _COUNTERS_REPLY = 9, 10
"""Attributes of a flow (CTA_*)."""
_COUNTERS = struct.Struct(">8sQ4sQ8sQ4sQ")
"""Counters of both directions in a row (CTA_COUNTERS_*), each of packets and bytes. The kernel adds padding
where 64 bits must be aligned."""
_NUMBER = struct.Struct("=HH")
_PACKETS, _BYTES = _NUMBER.pack(12, 1), _NUMBER.pack(12, 2)
_COUNTER_HEADS = (
    _NUMBER.pack(28, _COUNTERS_ORIG | NLA_F_NESTED) + _PACKETS, _BYTES,
    _NUMBER.pack(28, _COUNTERS_REPLY | NLA_F_NESTED) + _PACKETS, _BYTES,
)  # fmt: skip


class Volume(NamedTuple):
    """Packets and bytes in both directions. Bytes include IP headers."""

    packets_to_endpoint: int = 0
    bytes_to_endpoint: int = 0
    packets_from_endpoint: int = 0
    bytes_from_endpoint: int = 0

    def plus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.add, self, other))

    def minus(self, other: "Volume") -> "Volume":
        return Volume._make(map(operator.sub, self, other))


NO_VOLUME = Volume()


class NatBinding(NamedTuple):
    """A dialled socket and the endpoint to which connections to it are translated."""

    family: Family
    protocol: int
    destination: Address
    port: bytes
    """Of `destination`, in network order."""
    endpoint: Address
    endpoint_port: bytes


Volumes = Mapping[NatBinding, Volume]


def read_volumes(family: Family) -> dict[NatBinding, Volume]:
    """Return the sums over this thread's whole table, at 4.5 us a connection. Raises HostError."""
    with doing(f"list {family.label} connections"):
        return dump_flows(family, lambda found: _sums(found, family))


def ended_volumes(spans: Iterator[Span], family: Family) -> dict[NatBinding, Volume]:
    """Return the sums over ended connections of *family*, as announced in *spans*. Raises Malformed."""
    return _sums(decode(spans, family), family)


def _sums(flows: Iterable[TrackedFlow], family: Family) -> dict[NatBinding, Volume]:
    found: dict[tuple[int, Address, bytes, Address, bytes], list[int]] = {}
    for flow in flows:
        size, address, port = answered_by(family, flow)
        if address == flow.destination and port == flow.port:
            continue
        numbers = _numbers(flow, size)
        if numbers is None:
            continue  # It is older than the setting.
        sockets = flow.protocol, flow.destination, flow.port, address, port
        sums = found.setdefault(sockets, [0, 0, 0, 0])
        for at, number in enumerate(numbers):
            sums[at] += number
    return {NatBinding(family, *sockets): Volume(*sums) for sockets, sums in found.items()}


def _numbers(flow: TrackedFlow, size: int) -> Sequence[int] | None:
    """Return the counters behind a reply tuple of *size* bytes; None without any."""
    at = flow.data.find(_COUNTER_HEADS[0], flow.start, flow.end)
    if 0 <= at <= flow.end - _COUNTERS.size:
        found = _COUNTERS.unpack_from(flow.data, at)
        if found[::2] == _COUNTER_HEADS:
            return found[1::2]
    rest = attributes(flow.data, flow.start + flow.size + size, flow.end)
    if not rest.keys() >= {_COUNTERS_ORIG, _COUNTERS_REPLY}:
        return None
    both = [attributes(rest[kind], 0, len(rest[kind])) for kind in (_COUNTERS_ORIG, _COUNTERS_REPLY)]
    return [int.from_bytes(counters.get(kind, b""), "big") for counters in both for kind in (1, 2)]
