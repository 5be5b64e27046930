"""TCP connections that connection tracking saw fail (linux/netfilter/nf_conntrack_{common,tcp}.h)."""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kproxy_core.host.conntrack import filters
from kproxy_core.host.conntrack import table as ctnetlink
from kproxy_core.host.conntrack.volumes import Volumes, ended_volumes
from kproxy_core.host.errors import doing
from kproxy_core.host.netlink import messages as netlink
from kproxy_core.host.netlink.sockets import NetlinkSocket
from kproxy_core.host.netlink.watch import Watch
from kproxy_core.model.address import FAMILY_BY_AF, Family, Protocol
from kproxy_core.model.endpoint import Destination
from kproxy_core.plan.service_plan import Frontend

_NFNLGRP_CONNTRACK_DESTROY: Final = 3
_BUFFER: Final = 8 << 20
"""Bytes; a few seconds at 20,000 connections a second."""

_ASSURED: Final = 1 << 2
_TIMEOUT: Final = 7
_SIZE = struct.Struct("=H")


class Ended(NamedTuple):
    family: Family
    dialled: Frontend
    endpoint: Destination
    established: bool
    """False: the reset answered the SYN."""


class Unanswered(NamedTuple):
    """A TCP connection whose SYN has had no answer for a second."""

    id: bytes
    dialled: Frontend
    endpoint: Destination


class ResetWatch(Watch):
    """Reports connections as they end by a reset. An established one is reported ten seconds later."""

    def __init__(
        self, ended: Callable[[Sequence[Ended], bool], None], add_volumes: Callable[[Volumes], None] | None,
    ) -> None:
        """Both are called from a thread of their own; True: some events were lost. Raises HostError.

        *add_volumes* is told the sums over all connections that have ended. None: nothing is spent on them.
        """
        self._ended = ended
        self._add_volumes = add_volumes
        with doing("receive events of connection tracking"):
            sock = NetlinkSocket.open(
                netlink.NETLINK_NETFILTER, groups=(_NFNLGRP_CONNTRACK_DESTROY,), receive_space=_BUFFER,
                accept=filters.RESETS if add_volumes is None else filters.TRANSLATED)
        super().__init__("conntrack-events", sock, self._receive)

    def _receive(self, datagrams: Sequence[bytes], lost: bool) -> None:
        events = [(data, start, end) for data in datagrams for _, _, _, start, end in netlink.messages(data)]
        if self._add_volumes is not None:
            for af, family in FAMILY_BY_AF.items():
                of_family = (event for event in events if event[0][event[1]] == af)
                self._add_volumes(ended_volumes(of_family, family))
        found = list(_resets(events))
        if found or lost:
            self._ended(found, lost)


def read_unanswered(family: Family, syn_timeout: int) -> list[Unanswered]:
    """Return the connections that still have no answer a second after their last SYN.

    *syn_timeout*: seconds for which the kernel remembers a SYN. Acts on the network namespace of the calling
    thread. Raises HostError.
    """
    with doing(f"list {family.label} connections"):
        return ctnetlink.flows(
            family, lambda flows: list(_waiting(flows, family, syn_timeout)), ctnetlink.UNREPLIED)


def _waiting(
    flows: Iterable[ctnetlink.TrackedFlow], family: Family, syn_timeout: int
) -> Iterator[Unanswered]:
    for flow, dialled, endpoint in _translated(flows, family):
        found = netlink.attributes(flow.data, flow.start, flow.end)
        seconds = syn_timeout - _number(found[_TIMEOUT])  # rounded up
        if seconds > 1 and not _number(found[ctnetlink.STATUS]) & ctnetlink.SEEN_REPLY:
            yield Unanswered(found[ctnetlink.ID], dialled, endpoint)


def _resets(spans: Iterable[netlink.Span]) -> Iterator[Ended]:
    """Yield the translated TCP connections among destroyed ones that a reset has ended."""
    for data, start, end in spans:
        # Most connections end otherwise: look for the state first, behind the header and both tuples.
        at = start + netlink.NFGENMSG.size
        for _ in range(2):
            at += _SIZE.unpack_from(data, at)[0]
        rest = netlink.attributes(data, at, end)
        if ctnetlink.tcp_state(rest.get(ctnetlink.PROTOINFO, b"")) != ctnetlink.TCP_CLOSED:
            continue
        family = FAMILY_BY_AF[data[start]]
        for _, dialled, endpoint in _translated(ctnetlink.decode(iter([(data, start, end)]), family), family):
            assured = bool(_number(rest[ctnetlink.STATUS]) & _ASSURED)
            yield Ended(family, dialled, endpoint, assured)


def _translated(
    flows: Iterable[ctnetlink.TrackedFlow], family: Family
) -> Iterator[tuple[ctnetlink.TrackedFlow, Frontend, Destination]]:
    """Yield the TCP connections that another socket answers than the one dialled, and both sockets."""
    for flow in flows:
        by = ctnetlink.answered_by(family, flow)
        if flow.protocol == Protocol.TCP and (by.address, by.port) != (flow.destination, flow.port):
            dialled = Frontend(flow.destination, Protocol.TCP, _number(flow.port))
            yield flow, dialled, Destination(by.address, _number(by.port))


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")
