"""Traffic: connections that relays report, and UDP flows without an endpoint."""

import threading
import time
from collections.abc import Collection
from itertools import repeat
from operator import add
from uuid import uuid4

from kproxy_core.contract import (
    Address,
    Connections,
    Destination,
    Failure,
    Family,
    Frontend,
    Handshake,
    Protocol,
    family_of,
    parse_address,
)
from kproxy_core.linux.relay.orders import Count
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_userspace.kernel.arrivals import UnansweredFlow, unanswered_flows

_KEPT = 5400.0
"""Seconds after its last connection for which a count is kept: not an hour, see `kproxy_nft.counting`."""

_Subject = tuple[Family, Frontend, Destination | None]
_REJECTED = (1, *[0] * (len(Failure) + len(Handshake)))
"""Numbers of a rejected flow."""
_FAILED = slice(1, 1 + len(Failure))
"""Indices in `Count.numbers`; handshakes follow."""


class Traffic:
    """All counts of one backend instance. Any thread may call."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._instance = uuid4().hex
        self._lock = threading.Lock()
        self._found: dict[_Subject, tuple[tuple[int, ...], float]] = {}
        """Numbers, and the time of their last change."""
        self._rejected: dict[Family, dict[bytes, UnansweredFlow]] = {}
        """Counted flows, until the kernel forgets them."""

    def read(self, family: Family, refusing: Collection[int]) -> list[Connections]:
        """Return the connections of one family since this instance started.

        *refusing*: the ports of UDP relays without endpoints. Raises HostError.
        """
        with self._lock:
            now = time.monotonic()
            known = self._rejected.get(family, {})
            flows = unanswered_flows(family, {*refusing, *(flow.relay for flow in known.values())})
            rejected = {key: flow for key, flow in flows.items() if key in known or flow.relay in refusing}
            self._rejected[family] = rejected
            made = [(_subject(count), count.numbers) for count in self._workers.report()]
            made += [
                ((family, rejected[key].frontend, None), _REJECTED) for key in rejected.keys() - known.keys()]
            for subject, numbers in made:
                before, _ = self._found.get(subject, (repeat(0), now))
                self._found[subject] = tuple(map(add, before, numbers)), now
            self._found = {key: found for key, found in self._found.items() if found[1] >= now - _KEPT}
            return [
                Connections(frontend, where, numbers[0], self._instance, numbers[_FAILED], (),
                            numbers[_FAILED.stop:])
                for (of, frontend, where), (numbers, _) in self._found.items() if of is family
            ]


def _subject(count: Count) -> _Subject:
    address, protocol, port = count.frontend
    frontend = Frontend(None if address is None else Address(address), Protocol(protocol), port)
    host, endpoint_port = count.endpoint
    where = Destination(parse_address(host), endpoint_port)
    return family_of(where.address), frontend, where
