"""Retirement: leaving new connections to another mode, while relays continue until open ones end.

Conntrack sends a client's packets to the destination of its first one. Therefore relays listen for a grace
period, and then until no client is connecting to one. UDP clients are served until conntrack forgets them;
the other mode forwards their next datagram.
"""

import time
from collections import Counter as Clients
from collections.abc import Collection

from kproxy_core.contract import HostError, Leftovers, Protocol
from kproxy_core.linux.relay.counts import Counter
from kproxy_core.linux.relay.pool import WorkerPool
from kproxy_userspace.family import GRACE_SECONDS, FamilyState

_LONGEST_HANDSHAKE = 185.0
"""Seconds after which conntrack has forgotten every unfinished handshake.

The last SYN is sent 63 s after the first, and remembered for 120 s. Used only if conntrack can't be read.
"""


class Retirement:
    """The end of one backend's service."""

    def __init__(self, families: Collection[FamilyState], workers: WorkerPool, *, has_portals: bool) -> None:
        self._families = families
        self._workers = workers
        self._has_portals = has_portals
        self._since = time.monotonic()
        self.is_accepting = True
        """Whether a relay may be listening."""

    def advance(self) -> Leftovers:
        """Take the next steps. Return the deleted portals, and the number of clients still served."""
        self._workers.check()
        removed: list[str] = []
        errors: list[str] = []
        for family in self._families:
            try:
                removed += family.withdraw()
            except HostError as error:
                errors.append(str(error))
                self._since = time.monotonic()  # Its portals still redirect new clients.
        seconds = time.monotonic() - self._since
        in_grace = self._has_portals and seconds < GRACE_SECONDS
        arriving = Clients[Protocol]() if in_grace else self._arriving(seconds, errors)
        if self.is_accepting and not in_grace and not arriving[Protocol.TCP]:
            self.is_accepting = False
            for family in self._families:
                try:
                    family.stop_accepting()
                except HostError as error:
                    errors.append(str(error))
                    self.is_accepting = True
        # Counted last, because clients may just have been accepted.
        waiting = self._workers.count(Counter.CONNECTIONS) + arriving.total()
        return Leftovers(tuple(removed), tuple(errors), waiting, in_grace)

    def _arriving(self, seconds: float, errors: list[str]) -> Clients[Protocol]:
        """Return how many clients are connecting to relays, by protocol. Append problems to *errors*.

        *seconds* have passed since portals last redirected clients. TCP clients are not searched for if no
        relay accepts them: a node may have many connections.
        """
        found: Clients[Protocol] = Clients()
        if not self._has_portals:
            return found
        protocols = (Protocol.TCP, Protocol.UDP) if self.is_accepting else (Protocol.UDP,)
        for family in self._families:
            try:
                found += family.arriving(protocols)
            except HostError as error:
                errors.append(str(error))
                found[Protocol.TCP] += seconds < _LONGEST_HANDSHAKE
        return found
