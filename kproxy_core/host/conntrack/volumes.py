"""Packets and bytes of translated connections, which the kernel counts with ``nf_conntrack_acct``."""

import operator
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kproxy_core.host import sysctl
from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.messages import NLA_F_NESTED, Span
from kproxy_core.model.address import Address, Family

SETTING = "net.netfilter.nf_conntrack_acct"


class Volume(NamedTuple):
    """Numbers of both directions. Bytes are those of IP packets, headers included."""

    packets_to_endpoint: int = 0
    bytes_to_endpoint: int = 0
    packets_from_endpoint: int = 0
    bytes_from_endpoint: int = 0

    def plus(self, other: "Volume") -> "Volume":
        return Volume(*map(operator.add, self, other))

    def minus(self, other: "Volume") -> "Volume":
        return Volume(*map(operator.sub, self, other))


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
    try:
        with ctnetlink.open_socket() as sock:
            return ctnetlink.flows(sock, family, lambda flows: _sums(flows, family))
    except OSError as error:
        raise HostError(f"cannot list {family.label} connections", error) from error


def ended_volumes(events: Iterator[Span], family: Family) -> dict[Way, Volume]:
    """Return the sums over the connections that *events* report as destroyed."""
    return _sums(ctnetlink.decode(events, family), family)


def _sums(flows: Iterable[ctnetlink.TrackedFlow], family: Family) -> dict[Way, Volume]:
    found: dict[tuple[int, Address, bytes, Address, bytes], list[int]] = {}
    head, unpack, heads = _HEADS[0], _COUNTERS.unpack_from, _HEADS
    for flow in flows:
        _, address, port = ctnetlink.answered_by(family, flow)
        if address == flow.destination and port == flow.port:
            continue
        at = flow.data.find(head, flow.start, flow.end)
        if at < 0:
            continue  # It is older than the setting.
        first, packets, second, octets, third, packets_back, fourth, octets_back = unpack(flow.data, at)
        if (first, second, third, fourth) != heads:
            continue
        way = flow.protocol, flow.destination, flow.port, address, port
        sums = found.get(way)
        if sums is None:
            found[way] = [packets, octets, packets_back, octets_back]
        else:
            sums[0] += packets
            sums[1] += octets
            sums[2] += packets_back
            sums[3] += octets_back
    return {Way(family, *way): Volume(*sums) for way, sums in found.items()}


# The kernel writes the counters of both directions in a row: the attributes CTA_COUNTERS_ORIG and
# CTA_COUNTERS_REPLY, each with CTA_COUNTERS_PACKETS and CTA_COUNTERS_BYTES.
_COUNTERS = struct.Struct(">8sQ4sQ8sQ4sQ")
_NUMBER = struct.Struct("=HH")
_PACKETS, _BYTES = _NUMBER.pack(12, 1), _NUMBER.pack(12, 2)
_HEADS = (
    _NUMBER.pack(28, 9 | NLA_F_NESTED) + _PACKETS, _BYTES,
    _NUMBER.pack(28, 10 | NLA_F_NESTED) + _PACKETS, _BYTES,
)  # fmt: skip
