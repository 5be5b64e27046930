"""Traffic as connection tracking sees it, for all modes: bytes, packets and failed connections."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kproxy_core.contract.values import Failure
from kproxy_core.linux.conntrack import ACCT_SYSCTL, TcpFlow, accounting_enabled, read_unanswered
from kproxy_core.linux.conntrack_events import ResetWatch
from kproxy_core.linux.conntrack_volumes import NO_VOLUME, NatBinding, Volume, Volumes, read_volumes
from kproxy_core.linux.errors import HostError
from kproxy_core.model.address import Family, Protocol
from kproxy_core.model.service import Destination
from kproxy_core.plan.service_plan import Frontend

log = logging.getLogger("kproxy.run")


# Bytes and packets.

class Growth:
    """Computes the growth since the last reading from the sums over ended and over living connections. Pure.

    A connection that ends during a reading may be in neither sum. Then the sums of its NAT binding shrink,
    and the difference is subtracted from the ended connections of the next reading, which include it; not
    from later ones, as the kernel may have lost the event.
    """

    def __init__(self, alive: Volumes) -> None:
        """*alive*: sums that have been counted already."""
        self.alive = alive
        self._short: dict[NatBinding, Volume] = {}

    def add(self, ended: Volumes, alive: Volumes) -> Iterator[tuple[NatBinding, Volume]]:
        """Record a reading and yield the growth. *ended*: sums since the last reading."""
        before, self.alive = self.alive, alive
        short, self._short = self._short, {}
        for nat in {**before, **alive, **ended, **short}:
            new = _limited(ended.get(nat, NO_VOLUME).plus(short.get(nat, NO_VOLUME)), max)
            grown = new.plus(alive.get(nat, NO_VOLUME)).minus(before.get(nat, NO_VOLUME))
            if min(grown) < 0:
                self._short[nat] = _limited(grown, min)
            if max(grown) > 0:
                yield nat, _limited(grown, max)


def _limited(volume: Volume, limit: Callable[[int, int], int]) -> Volume:
    """Return *volume* without negative numbers if *limit* is max, without positive ones if it is min."""
    return Volume(*(limit(0, number) for number in volume))


class VolumeReader:
    """Reads the kernel's byte and packet counts. `add_ended` may be called from any thread."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self._growth = Growth({})
        self.is_counted = False
        """The kernel counts bytes. If not, `read` returns nothing."""
        self._ended: dict[NatBinding, Volume] = {}
        self._lock = threading.Lock()

    @property
    def alive(self) -> Volumes:
        """The sums over the connections in the table, as of the last reading."""
        return self._growth.alive

    def check(self) -> None:
        """Set `is_counted`."""
        self.is_counted = accounting_enabled()
        if not self.is_counted:
            log.info("bytes are not counted", extra={"fields": {"because": f"{ACCT_SYSCTL} is not 1"}})

    def start(self, alive: Volumes) -> None:
        """Start counting if the kernel does. `add_ended` may have been called before.

        *alive*: sums that an earlier process has counted; empty: everything in the table counts as counted.
        """
        if not self.is_counted:
            return
        try:
            self._growth = Growth(alive or self._read())
        except HostError as error:
            self.is_counted = False
            log.warning("bytes are not counted", extra={"fields": {"error": str(error)}})

    def add_ended(self, volumes: Volumes) -> None:
        """Add the sums over connections that have ended."""
        with self._lock:
            for nat, volume in volumes.items():
                self._ended[nat] = self._ended.get(nat, NO_VOLUME).plus(volume)

    def read(self) -> Sequence[tuple[NatBinding, Volume]]:
        """Return the growth since the last reading, by NAT binding."""
        if not self.is_counted:
            return ()
        with self._lock:
            ended, self._ended = self._ended, {}
        try:
            return list(self._growth.add(ended, self._read()))
        except HostError as error:
            log.debug("cannot read bytes of connections", extra={"fields": {"error": str(error)}})
            self.add_ended(ended)
            return ()

    def _read(self) -> Mapping[NatBinding, Volume]:
        found: dict[NatBinding, Volume] = {}
        for family in self._families:
            found |= read_volumes(family)
        return found


# Failed connections.

_UNANSWERED = 1
"""Seconds, rounded up, for which the last SYN of an unanswered connection has had no answer."""
_SYN_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_syn_sent")
_USUAL_SYN_TIMEOUT = 120

Report = Callable[[Family, Frontend, Destination, Failure], None]


class Failures:
    """Reports each connection that connection tracking saw fail, once. Any thread may call *report*."""

    def __init__(self, families: Sequence[Family], report: Report) -> None:
        self._families = families
        self._report = report
        self._unanswered: dict[Family, frozenset[bytes]] = {}
        """Reported connections that the table still holds."""
        self._lock = threading.Lock()
        self._watch: ResetWatch | None = None
        self.lost = 0
        """Number of times that the kernel dropped events because they were not read fast enough."""

    def start(self, add_volumes: Callable[[Volumes], None] | None) -> None:
        """Start following events. Without them, which is logged, only unanswered connections are reported.

        *add_volumes*: see `ResetWatch`.
        """
        try:
            self._watch = ResetWatch("conntrack-events", self._ended, add_volumes)
        except HostError as error:
            log.warning("refused and reset connections are not counted", extra={
                "fields": {"error": str(error)}})

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def read(self) -> None:
        timeout = _syn_timeout()
        for family in self._families:
            try:
                found = read_unanswered(family)
            except HostError as error:
                log.debug("cannot read unanswered connections", extra={"fields": {"error": str(error)}})
                continue
            waiting = [flow for flow in found if timeout - flow.timeout > _UNANSWERED]
            with self._lock:
                known = self._unanswered.get(family, frozenset())
                self._unanswered[family] = frozenset(flow.id for flow in waiting)
            for flow in waiting:
                if flow.id not in known:
                    self._tell(flow, Failure.UNANSWERED)

    def _ended(self, found: Sequence[TcpFlow], lost: bool) -> None:
        self.lost += lost
        for flow in found:
            if flow.is_translated:
                self._tell(flow, Failure.RESET if flow.is_assured else Failure.REFUSED)

    def _tell(self, flow: TcpFlow, failure: Failure) -> None:
        address, port = flow.dialled
        self._report(flow.family, Frontend(address, Protocol.TCP, port), flow.endpoint, failure)


def _syn_timeout() -> int:
    try:
        return int(_SYN_TIMEOUT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _USUAL_SYN_TIMEOUT
