"""Packets and bytes of translated connections, which the kernel counts with ``nf_conntrack_acct``."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kproxy_core.host import sysctl
from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.errors import HostError
from kproxy_core.host.netlink.messages import Span, attribute_spans, attributes
from kproxy_core.model.address import Address, Family

SETTING = "net.netfilter.nf_conntrack_acct"
_TO_ENDPOINT, _FROM_ENDPOINT = 9, 10
"""Attributes CTA_COUNTERS_ORIG and CTA_COUNTERS_REPLY."""
_PACKETS, _BYTES = 1, 2


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
    """Return the sums over this thread's whole table, at 3 us a connection. Raises HostError."""
    try:
        with ctnetlink.open_socket() as sock:
            return ctnetlink.flows(sock, family, lambda flows: _sums(flows, family))
    except OSError as error:
        raise HostError(f"cannot list {family.label} connections", error) from error


def ended_volumes(events: Iterator[Span], family: Family) -> dict[Way, Volume]:
    """Return the sums over the connections that *events* report as destroyed."""
    return _sums(ctnetlink.decode(events, family), family)


def _sums(flows: Iterable[ctnetlink.TrackedFlow], family: Family) -> dict[Way, Volume]:
    found: dict[Way, Volume] = {}
    for flow in flows:
        size, address, port = ctnetlink.answered_by(family, flow)
        if (address, port) == (flow.destination, flow.port):
            continue
        rest = {kind: (first, last) for kind, first, last in
                attribute_spans(flow.data, flow.start + flow.size + size, flow.end)}
        if _TO_ENDPOINT in rest and _FROM_ENDPOINT in rest:
            way = Way(family, flow.protocol, flow.destination, flow.port, address, port)
            volume = Volume(*_numbers(flow.data, *rest[_TO_ENDPOINT]),
                            *_numbers(flow.data, *rest[_FROM_ENDPOINT]))
            known = found.get(way)
            found[way] = volume if known is None else known.plus(volume)
    return found


def _numbers(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return packets and bytes."""
    found = attributes(data, start, end)
    return int.from_bytes(found[_PACKETS], "big"), int.from_bytes(found[_BYTES], "big")
